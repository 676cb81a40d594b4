/** The WebAssembly back end: one module for the whole plan, one call a run. */

import {TinyedgeError, builtin, outputArray, outputBytes, weights, whole, within} from './loader.js';

const READY = 20_000; // milliseconds in which a thread has to be there

/** Tiny modules that are valid where a plan's instructions are. */
const header = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10];
const zero = [65, 0, 253, 15]; // i32.const 0, i8x16.splat
const PROBES = {
  simd128: [...header, 8, 1, 6, 0, ...zero, 11],
  // f32x4.relaxed_madd
  relaxed: [...header, 19, 1, 17, 0, ...zero, ...zero, ...zero, 253, 133, 2, 11],
};

const wasm = {
  async select(plans, {threads}) {
    if (typeof WebAssembly !== 'object') return 'there is no WebAssembly';
    const plan = plans.find(p => WebAssembly.validate(new Uint8Array(PROBES[p.target.split(':')[1]])));
    if (!plan) return 'WebAssembly has no 128-bit vectors here; use a browser from 2023 or newer';
    if (threads !== undefined && !(Number.isInteger(threads) && threads > 0)) {
      throw new TinyedgeError('input', `threads is ${threads} but must be a whole number from 1 on`);
    }
    const cores = globalThis.navigator?.hardwareConcurrency
      ?? builtin('node:os')?.availableParallelism() ?? 1;
    // memory is shared with other threads in isolated pages, and in Node
    const shared = globalThis.crossOriginIsolated ?? !!builtin('node:worker_threads');
    return {plan, threads: shared ? Math.min(threads ?? Math.min(cores, 4), plan.threads) : 1};
  },

  async open({plan, threads}, model, [file, ...rest], context) {
    const shared = threads > 1, workers = [];
    let memory;
    try {
      memory = new WebAssembly.Memory({initial: plan.pages, maximum: plan.pages, shared});
    } catch (error) {
      throw new TinyedgeError('unsupported', `${plan.pages * 65536} bytes of memory can't be had`,
        error);
    }
    let loading = true;
    const made = whole(file, context).then(async code => {
      code[plan.flag] = shared ? 3 : 1; // how the import of the memory is declared
      const module = await WebAssembly.compile(code);
      const {exports} = new WebAssembly.Instance(module, {env: {memory}});
      // Engines compile well what they have seen run: every kernel runs while the weights come.
      const turn = turns();
      for (let i = 0; loading && i < plan.warmers; i++) {
        exports.warm(i);
        await turn();
      }
      return {module, exports};
    });
    made.catch(() => {}); // awaited below, also where the weights fail first
    try {
      await weights(plan, rest, context, (at, bytes) =>
        new Uint8Array(memory.buffer, plan.constants + at, bytes.length).set(bytes));
    } finally {
      loading = false;
    }
    const {module, exports} = await made;
    if (plan.warmers) { // what that has left among intermediate values and states is gone
      new Uint8Array(memory.buffer).fill(0, plan.scratch, plan.states[0] + plan.states[1]);
    }
    for (const [at, blocks, inner, number] of plan.filters ?? []) {
      const [places, taps, matrix] = plan.matrices[number];
      // the end of a stack, which only deeper calls would reach
      new Float32Array(memory.buffer, plan.stacks, matrix.length).set(matrix);
      for (let block = 0; block < blocks; block++) {
        exports.filter(plan.constants + at, blocks, block, inner, places, taps, plan.stacks);
      }
    }
    const end = async () => {
      if (workers.length) exports.stop();
      await Promise.all(workers.map(w => w.terminate()));
    };
    try {
      for (let number = 1; number < threads; number++) workers.push(thread());
      await within(Promise.all(workers.map((worker, i) => ready(worker, {
        module, memory, threads, stack: plan.stacks + plan.stackSize * (i + 2), // they grow down
      }))), READY, 'the worker threads did not start; load with {threads: 1}');
    } catch (error) {
      await end();
      throw error;
    }
    let failed;
    return {
      info: {threads},
      isBuffer: () => false,

      async run({arrays, symbols, shapes}, wanted) {
        if (failed) throw failed;
        if (wanted !== 'cpu') {
          throw new TinyedgeError('unsupported', 'the model runs on WebAssembly and gives no GPU '
            + "buffers; ask for outputs: 'cpu'");
        }
        const {buffer} = memory;
        arrays.forEach((a, i) => new Uint8Array(buffer).set(
          new Uint8Array(a.buffer, a.byteOffset, a.byteLength), plan.inputs[i]));
        Object.keys(model.symbols).forEach((name, i) => {
          new BigInt64Array(buffer, plan.symbols, i + 1)[i] = BigInt(symbols[name]);
        });
        let status;
        try {
          status = exports.run(threads);
        } catch (error) {
          failed = new TinyedgeError('lost', `the model's code failed: ${error.message}; load it again`,
            error);
          throw failed;
        }
        if (status) {
          failed = new TinyedgeError('timeout', 'a thread did not answer in time; load the model again');
          throw failed;
        }
        return model.outputs.map((port, i) => outputArray(port, shapes[i], buffer, plan.outputs[i]));
      },

      reset: () => new Uint8Array(memory.buffer, ...plan.states).fill(0),

      async dispose() {
        await end();
        memory = undefined;
      },
    };
  },
};

/** A function that lets other tasks go first; setTimeout would wait. */
function turns() {
  if (globalThis.setImmediate) return () => new Promise(resolve => setImmediate(resolve));
  const {port1, port2} = new MessageChannel();
  return () => new Promise(resolve => {
    port1.onmessage = resolve;
    port2.postMessage(0);
  });
}

/** A module worker; in Node a thread. */
function thread() {
  const node = builtin('node:worker_threads');
  if (!node) return new Worker(new URL('./thread.js', import.meta.url), {type: 'module'});
  return new node.Worker(new URL('./thread.js', import.meta.url));
}

function ready(worker, message) {
  return new Promise((resolve, reject) => {
    const fail = event => reject(new TinyedgeError('unsupported',
      `a worker thread did not start: ${event.message ?? 'thread.js is missing'}`));
    if (worker.on) {
      // a process ends when it is done, also with a model that nobody disposed of
      worker.once('message', () => { worker.unref(); resolve(); }).on('error', fail);
    } else Object.assign(worker, {onmessage: resolve, onerror: fail});
    worker.postMessage(message);
  });
}
