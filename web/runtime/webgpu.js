/** The WebGPU back end: buffers and bind groups made once, one command buffer a run. */

import {TinyedgeError, evaluate, outputArray, outputBytes, weights, within} from './loader.js';

const DEADLINE = 300_000; // milliseconds that the device may take to answer
const GROUPS = 65535; // most workgroups in one dimension of a dispatch
const KEPT = 8; // bind groups that a launch keeps for buffers of the page's
const STORAGE = 0x80, COPY_SRC = 4, COPY_DST = 8, UNIFORM = 0x40, MAP_READ = 1; // GPUBufferUsage
const COMPUTE = 4; // GPUShaderStage

const LAUNCH = 0, COPY = 1, IF = 2; // kinds of steps; a loop is what is left

const padded = bytes => Math.max(Math.ceil(bytes / 4) * 4, 4);

const webgpu = {
  async select(plans, {device}) {
    const given = typeof device === 'object';
    const adapter = given ? device : await globalThis.navigator?.gpu?.requestAdapter(
      {powerPreference: 'high-performance'});
    if (!adapter) return 'there is no WebGPU adapter';
    let reason;
    for (const plan of plans) {
      const lack = plan.features.find(f => !adapter.features.has(f));
      const [limit, need] = Object.entries(plan.limits).find(([k, v]) => adapter.limits[k] < v) ?? [];
      if (lack) reason = `the adapter has no ${lack}`;
      else if (limit) reason = `the model needs ${limit} of ${need}, and the adapter has ${adapter.limits[limit]}`;
      else if (given) return {plan, device};
      else {
        const made = await adapter.requestDevice(
          {requiredFeatures: plan.features, requiredLimits: plan.limits, label: 'tinyedge'});
        return {plan, device: made, adapter, release: () => made.destroy()};
      }
    }
    return reason;
  },

  async open({plan, device, adapter, release}, model, files, context) {
    let lost, disposed = false;
    device.lost.then(({reason, message}) => {
      lost = new TinyedgeError('lost', `the GPU device was lost (${message || reason}); load the model `
        + 'again');
    });
    /** The result, or the loss that made it fail. */
    async function guarded(promise, what) {
      try {
        return await within(promise, DEADLINE, `the GPU did not finish ${what}`);
      } catch (error) {
        // a loss rejects what waits for the device a moment before it says so itself
        if (!lost) await new Promise(resolve => setTimeout(resolve, 20));
        throw lost ?? error;
      }
    }
    async function scoped(what, work) {
      device.pushErrorScope('out-of-memory');
      device.pushErrorScope('validation');
      let value, failure;
      try { value = await work(); } catch (error) { failure = error; }
      const errors = await guarded(Promise.all([device.popErrorScope(), device.popErrorScope()]), what);
      if (failure) throw failure;
      const error = errors.find(Boolean);
      if (error) throw new TinyedgeError('unsupported', `the GPU refuses ${what}: ${error.message}`);
      return value;
    }

    const layouts = new Map(), uniforms = [], made = [];
    const buffer = (size, usage, label) => {
      made.push(device.createBuffer({size: padded(size), usage, label}));
      return made.at(-1);
    };
    let buffers, staging, launches = [];
    const ids = new WeakMap();
    let nextId = 0;

    /** The bind group of a launch for the buffers that are bound now. */
    function group(launch) {
      const key = launch.external.map(i => {
        if (!ids.has(bound[i])) ids.set(bound[i], nextId++);
        return ids.get(bound[i]);
      }).join();
      let found = launch.groups.get(key);
      if (!found) {
        const entries = launch.refs.map(([number, offset, size], binding) => {
          const target = bound[number];
          // a page's own buffer may be as small as this run's shape
          const most = target === buffers[number] ? padded(size) : Math.min(padded(size), target.size - offset);
          return {binding, resource: {buffer: target, offset, size: most}};
        });
        if (launch.uniform >= 0) {
          entries.push({binding: entries.length, resource: {buffer: uniforms[launch.uniform].buffer}});
        }
        found = device.createBindGroup({layout: launch.layout, entries});
        if (launch.groups.size === KEPT) launch.groups.clear();
        launch.groups.set(key, found);
      }
      return found;
    }

    /** The layout that kernels with these buffers share. */
    function layout(writes, count, uniform) {
      const types = Array.from({length: count}, (_, i) =>
        writes.includes(i) ? 'storage' : 'read-only-storage');
      if (uniform) types.push('uniform');
      const key = types.join();
      if (!layouts.has(key)) {
        layouts.set(key, device.createBindGroupLayout({entries: types.map((type, binding) =>
          ({binding, visibility: COMPUTE, buffer: {type}}))}));
      }
      return layouts.get(key);
    }

    /** Steps with their objects: launches become {pipeline, groups, ...}. */
    const prepared = steps => steps.map(([kind, ...step]) => {
      if (kind === LAUNCH) {
        const [kernel, refs, grid, uniform = -1] = step;
        const {writes} = plan.kernels[kernel];
        const launch = {kind, kernel, refs, grid, uniform, groups: new Map(),
          layout: layout(writes, refs.length, uniform >= 0),
          external: refs.map(r => r[0]).filter(i => plan.ports.includes(i))};
        launches.push(launch);
        return launch;
      }
      if (kind === COPY) return {kind, step};
      if (kind === IF) return {kind, cond: step[0], then: prepared(step[1]), other: prepared(step[2])};
      const [symbol, trips, cond, body] = step;
      return {kind, symbol, trips, cond, body: prepared(body)};
    });

    let bound, steps, first = true;
    await scoped('the model', async () => {
      buffers = plan.buffers.map((size, i) => buffer(size, STORAGE | COPY_SRC | COPY_DST, `${model.name} ${i}`));
      bound = [...buffers];
      staging = buffer(plan.staging, MAP_READ | COPY_DST, 'staging');
      for (const names of plan.uniforms) {
        const values = new Int32Array(Math.ceil(names.length / 4) * 4);
        uniforms.push({names, values, buffer: buffer(values.byteLength, UNIFORM | COPY_DST, 'symbols')});
      }
      steps = prepared(plan.steps);
      const pipelines = plan.kernels.map(({name, code}, i) => {
        const launch = launches.find(l => l.kernel === i);
        return device.createComputePipelineAsync({
          label: name, layout: device.createPipelineLayout({bindGroupLayouts: [launch.layout]}),
          compute: {module: device.createShaderModule({code, label: name}), entryPoint: 'main'}});
      });
      pipelines.forEach(p => p.catch(() => {})); // awaited below, also where the weights fail first
      launches.forEach(group);
      await weights(plan, files, context, (at, bytes) =>
        device.queue.writeBuffer(buffers[plan.constants], at, bytes));
      const ready = await guarded(Promise.all(pipelines), 'compiling the kernels').catch(error => {
        throw error instanceof TinyedgeError ? error :
          new TinyedgeError('unsupported', `the GPU refuses a kernel: ${error.message}`, error);
      });
      for (const launch of launches) launch.pipeline = ready[launch.kernel];
    });

    let encoder, pass;
    const commands = () => {
      pass?.end();
      pass = undefined;
      return encoder ??= device.createCommandEncoder();
    };
    const submit = () => {
      device.queue.submit([commands().finish()]);
      encoder = undefined;
    };
    /** Calls use(bytes) with what copies have brought into the staging buffer. */
    async function staged(size, use) {
      submit();
      await guarded(staging.mapAsync(1, 0, padded(size)), 'a run');
      try {
        return use(staging.getMappedRange(0, padded(size)));
      } finally {
        staging.unmap();
      }
    }
    const number = ([from, offset], size) => {
      commands().copyBufferToBuffer(bound[from], offset, staging, 0, padded(size));
      return staged(size, bytes => size === 8 ? Number(new BigInt64Array(bytes, 0, 1)[0]) : new Uint8Array(bytes)[0]);
    };
    function setSymbols(symbols) {
      for (const {names, values, buffer: target} of uniforms) {
        const next = names.map(name => symbols[name] ?? 0);
        if (next.every((v, i) => v === values[i]) && target.written) continue;
        values.set(next);
        target.written = true;
        device.queue.writeBuffer(target, 0, values);
      }
    }
    async function execute(list, symbols) {
      for (const s of list) {
        if (s.kind === LAUNCH) {
          const count = evaluate(s.grid, symbols);
          if (!count) continue;
          pass ??= commands().beginComputePass();
          pass.setPipeline(s.pipeline);
          pass.setBindGroup(0, group(s));
          pass.dispatchWorkgroups(Math.min(count, GROUPS), Math.ceil(count / GROUPS));
        } else if (s.kind === COPY) {
          const [from, fromAt, to, toAt, size] = s.step;
          const bytes = evaluate(size, symbols);
          if (bytes) commands().copyBufferToBuffer(bound[from], fromAt, bound[to], toAt, bytes);
        } else if (s.kind === IF) {
          await execute(await number(s.cond, 1) ? s.then : s.other, symbols);
        } else {
          const trips = await number(s.trips, 8);
          for (let turn = 0; turn < trips && await number(s.cond, 1); turn++) {
            const inner = {...symbols, [s.symbol]: turn};
            setSymbols(inner);
            await execute(s.body, inner);
          }
        }
      }
    }

    const isBuffer = value => value?.usage !== undefined && typeof value.mapAsync === 'function';

    /** Whether the page's buffer can stand in for a port's. */
    function usable(value, name, usage) {
      if (!isBuffer(value)) throw new TinyedgeError('input', `output ${name} must be a GPUBuffer`);
      if ((value.usage & usage) !== usage) {
        throw new TinyedgeError('input', `the buffer of ${name} must have the usages STORAGE, COPY_SRC`
          + ' and COPY_DST');
      }
      return value;
    }

    async function once({arrays, symbols, shapes}, wanted) {
      bound = [...buffers];
      arrays.forEach((value, i) => {
        const to = plan.inputs[i];
        if (isBuffer(value)) {
          bound[to] = usable(value, model.inputs[i].name, STORAGE | COPY_SRC);
        } else if (value.byteLength) {
          const whole = value.byteLength % 4 ? new Uint8Array(padded(value.byteLength)) : value;
          if (whole !== value) whole.set(new Uint8Array(value.buffer, value.byteOffset, value.byteLength));
          device.queue.writeBuffer(buffers[to], 0, whole);
        }
      });
      const sizes = shapes.map((shape, i) => outputBytes(model.outputs[i], shape));
      if (typeof wanted === 'object') {
        for (const [name, value] of Object.entries(wanted)) {
          const i = model.outputs.findIndex(port => port.name === name);
          if (i < 0) {
            throw new TinyedgeError('input', `there is no output ${name}; the outputs are `
              + model.outputs.map(port => port.name).join(', '));
          }
          usable(value, name, STORAGE | COPY_SRC | COPY_DST);
          if (value.size < sizes[i] || bound.includes(value)) {
            throw new TinyedgeError('input', `the buffer of output ${name} must be one of its own with at `
              + `least ${sizes[i]} bytes`);
          }
          bound[plan.outputs[i]] = value;
        }
      }
      setSymbols(symbols);
      await execute(steps, symbols);
      if (wanted !== 'cpu') {
        submit();
        return plan.outputs.map(i => bound[i]);
      }
      let total = 0;
      const places = sizes.map((size, i) => {
        const at = total;
        if (size) commands().copyBufferToBuffer(bound[plan.outputs[i]], 0, staging, at, padded(size));
        total += Math.ceil(size / 8) * 8;
        return at;
      });
      return staged(total, bytes =>
        model.outputs.map((port, i) => outputArray(port, shapes[i], bytes, places[i])));
    }

    return {
      info: {threads: 0, adapter: adapter?.info?.description || adapter?.info?.vendor || ''},
      isBuffer,

      async run(call, wanted) {
        if (lost) throw lost;
        if (wanted !== 'cpu' && wanted !== 'gpu' && (wanted === null || typeof wanted !== 'object')) {
          throw new TinyedgeError('input', "outputs must be 'cpu', 'gpu' or an object of GPU buffers");
        }
        try {
          if (!first) return await once(call, wanted);
          const result = await scoped('a run', () => once(call, wanted));
          first = false;
          return result;
        } catch (error) {
          pass = encoder = undefined;
          throw lost ?? error;
        }
      },

      reset() {
        if (plan.states < 0) return;
        commands().clearBuffer(buffers[plan.states]);
        submit();
      },

      dispose() {
        if (disposed) return;
        disposed = true;
        made.forEach(b => b.destroy());
        release?.();
      },
    };
  },
};
