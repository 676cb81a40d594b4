/** What every bundle has: errors, downloads, weights, shapes, and the model that a page holds. */

/**
 * A failure that a program can tell by its `code`: "input", "network", "integrity", "unsupported",
 * "lost", "disposed" or "timeout". An aborted load rejects with its signal's own reason instead.
 */
export class TinyedgeError extends Error {
  constructor(code, message, cause) {
    super(message, {cause});
    this.name = 'TinyedgeError';
    this.code = code;
  }
}

const STALL = 60_000; // milliseconds for which a download may stand still

const TYPES = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, int8: Int8Array,
  uint8: Uint8Array, bool: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array,
  uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
};
const ALSO = {float16: 'Float16Array', uint8: 'Uint8ClampedArray'};

/** A module of Node's, undefined elsewhere; asked for in a way that bundlers leave alone. */
export const builtin = name => globalThis.process?.getBuiltinModule?.(name);

/** The promise, or a failure after so many milliseconds. */
export function within(promise, milliseconds, message) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TinyedgeError('timeout', message)), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

// downloads

/** Where a file lies. */
const place = (file, {baseUrl}) => baseUrl ? new URL(file.name, baseUrl) : new URL(file.url);

/** A file's bytes as they come: {source, forget}; nothing has been read of them yet. */
async function opened(file, context) {
  const url = place(file, context);
  const fs = url.protocol === 'file:' && builtin('node:fs');
  if (fs) return {source: fs.createReadStream(url)[Symbol.asyncIterator]()};
  if (url.protocol === 'data:') { // bundlers put small files into the script
    const bytes = Uint8Array.from(atob(url.pathname.split(',')[1]), c => c.charCodeAt(0));
    return {source: [bytes].values()};
  }
  const {cache, signal} = context;
  const key = new URL(url);
  key.searchParams.set('sha256', file.hashes[0]);
  const kept = await cache?.match(key.href);
  if (kept) {
    return {source: stream(kept.body), forget: () => cache.delete(key.href)};
  }
  const response = await within(
    fetch(url, {signal}), STALL, `${file.name}: the server does not answer`);
  if (!response.ok) {
    throw new TinyedgeError('network', `${file.name}: the server answered ${response.status} to `
      + `${url}; put the bundle's files there`);
  }
  if (!cache || !/^https?:$/.test(url.protocol)) return {source: stream(response.body)};
  const [mine, copy] = response.body.tee();
  const store = cache.put(key.href, new Response(copy)).then(async () => {
    for (const {url: old} of await cache.keys()) {
      if (old !== key.href && old.split('?')[0] === key.href.split('?')[0]) await cache.delete(old);
    }
  }).catch(() => {}); // a full disk costs the next visit a download, not this one the model
  context.stores.push(store);
  return {source: stream(mine), forget: () => store.then(() => cache.delete(key.href))};
}

function stream(body) {
  const reader = body.getReader();
  return {next: () => reader.read(), return: () => reader.cancel()};
}

/** Calls take(bytes, offset) with checked pieces of a file; what it is given is used again. */
export async function download(file, context, take, opening = opened(file, context)) {
  const {signal} = context;
  const fail = (code, what, cause) => new TinyedgeError(code, `${file.name} ${what}`, cause);
  const size = Math.min(context.chunk, file.size);
  let chunk = new Uint8Array(size), other = new Uint8Array(size);
  let source, forget, filled = 0, done = 0, checking;
  const check = async (bytes, at) => {
    if (!await intact(bytes, file.hashes[at / context.chunk])) {
      throw fail('integrity', forget ? 'is damaged, and its cached copy is removed; load '
        + 'again' : 'is damaged: another SHA-256 than the exported one; put the bundle there again');
    }
    signal?.throwIfAborted();
    await take(bytes, at);
  };
  try {
    ({source, forget} = await opening);
    // the next piece is on its way while one is copied, and the next chunk while one is checked
    const ask = () => {
      const next = Promise.resolve(source.next());
      next.catch(() => {}); // awaited in its turn
      return next;
    };
    let coming = ask();
    while (done < file.size) {
      const stalled = `${file.name}: nothing has come for ${STALL / 1000} seconds`;
      const {value: piece, done: ended} = await within(coming, STALL, stalled);
      signal?.throwIfAborted();
      if (ended) break;
      coming = ask();
      if (done + filled + piece.length > file.size) {
        throw fail('integrity', `has more than its ${file.size} bytes; put the bundle there again`);
      }
      for (let from = 0; from < piece.length;) {
        const part = piece.subarray(from, from + chunk.length - filled);
        chunk.set(part, filled);
        filled += part.length;
        from += part.length;
        context.advance(part.length);
        if (filled < chunk.length && done + filled < file.size) break;
        await checking;
        checking = check(chunk.subarray(0, filled), done);
        checking.catch(() => {}); // awaited in its turn
        [chunk, other] = [other, chunk];
        done += filled;
        filled = 0;
      }
    }
    await checking;
    if (done < file.size) {
      throw fail('integrity', `ends after ${done + filled} of ${file.size} bytes; load again`);
    }
  } catch (error) {
    Promise.resolve(source?.return?.()).catch(() => {});
    await checking?.catch(() => {});
    await forget?.();
    signal?.throwIfAborted();
    if (error instanceof TinyedgeError) throw error;
    throw fail('network', `can't be read from ${place(file, context)}: ${error.message ?? error}`, error);
  }
}

async function intact(bytes, hash) {
  // pages that came over plain http have no crypto.subtle, and no promise to keep
  const digest = await globalThis.crypto?.subtle?.digest('SHA-256', bytes);
  return !digest || btoa(String.fromCharCode(...new Uint8Array(digest))) === hash;
}

/** A small file as one array. */
export async function whole(file, context) {
  const bytes = new Uint8Array(file.size);
  await download(file, context, (part, at) => bytes.set(part, at));
  return bytes;
}

// weights

const RAW = 0, HALF = 1, SCALES = 2, QUANTISED = 3;

/**
 * Downloads weights and calls write(offset, bytes) with them as the kernels want them.
 * sections: [kind, offset, count, digits] in the files' order; count is of bytes (RAW) or elements;
 * digits [stride, extent, factor] say which of the scales before it an element takes.
 */
export async function weights(plan, files, context, write) {
  const halves = plan.sections.some(s => s[0] === HALF) && halfTable();
  let index = 0, at = 0, scales;
  const expand = bytes => {
    for (let from = 0; from < bytes.length;) {
      const [kind, offset, count, digits] = plan.sections[index];
      const size = [1, 2, 4, 1][kind];
      const n = Math.min(count - at, (bytes.length - from) / size);
      const part = bytes.subarray(from, from + n * size);
      if (kind === RAW) {
        write(offset + at, part);
      } else if (kind === SCALES) {
        scales = at ? scales : new Float32Array(count);
        new Uint8Array(scales.buffer).set(part, at * 4);
      } else {
        const out = new Float32Array(n);
        if (kind === HALF) {
          const codes = new Uint16Array(bytes.buffer, bytes.byteOffset + from, n);
          for (let i = 0; i < n; i++) out[i] = halves[codes[i]];
        } else {
          const codes = new Int8Array(bytes.buffer, bytes.byteOffset + from, n);
          for (let i = 0; i < n; i++) {
            let scale = 0;
            for (const [stride, extent, factor] of digits) {
              scale += Math.floor((at + i) / stride) % extent * factor;
            }
            out[i] = codes[i] * scales[scale];
          }
        }
        write(offset + at * 4, new Uint8Array(out.buffer));
      }
      at += n;
      from += n * size;
      if (at === count) {
        from = Math.ceil(from / 4) * 4; // sections begin at multiples of 4
        at = 0;
        index++;
      }
    }
  };
  const open = file => {
    const opening = file && opened(file, context);
    opening?.catch(() => {}); // awaited in its turn
    return opening;
  };
  let next = open(files[0]);
  try {
    for (const [i, file] of files.entries()) {
      const opening = next;
      next = open(files[i + 1]); // the server answers meanwhile
      await download(file, context, expand, opening);
    }
  } catch (error) {
    next?.then(({source}) => source.return?.()).catch(() => {});
    throw error;
  }
}

function halfTable() {
  return Float32Array.from({length: 65536}, (_, code) => {
    const sign = code & 0x8000 ? -1 : 1, exponent = code >> 10 & 31, mantissa = code & 1023;
    if (exponent === 31) return mantissa ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + mantissa / 1024) : 2 ** -24 * mantissa);
  });
}

// shapes and arguments

/** The number that a size stands for: an int, or an expression of symbols. */
export function evaluate(size, symbols) {
  if (!Array.isArray(size)) return size;
  if (size[0] === 'sym') return symbols[size[1]];
  const a = evaluate(size[1], symbols), b = evaluate(size[2], symbols);
  switch (size[0]) {
    case 'add': return a + b;
    case 'mul': return a * b;
    case 'floordiv': return Math.floor(a / b);
    case 'mod': return a - Math.floor(a / b) * b;
    case 'min': return Math.min(a, b);
    default: return Math.max(a, b);
  }
}

const product = shape => shape.reduce((a, b) => a * b, 1);
const wrong = message => new TinyedgeError('input', message);
const show = shape => `[${shape.map(d => Array.isArray(d) ? d[1] : d)}]`;

/** Checks a run's inputs: {arrays, symbols, shapes of outputs}. */
function checked(model, inputs, isBuffer) {
  const names = model.inputs.map(p => p.name);
  if (inputs === null || typeof inputs !== 'object') {
    throw wrong(`run() takes an object with the inputs ${names.join(', ')}`);
  }
  for (const name of Object.keys(inputs)) {
    if (!names.includes(name)) {
      throw wrong(model.states.some(s => s.name === name)
        ? `input ${name} is a state, which the model keeps itself; leave it out`
        : `there is no input ${name}; the inputs are ${names.join(', ') || 'none'}`);
    }
  }
  const given = model.inputs.map(({name, dtype, shape: form}) => {
    const value = inputs[name];
    const tensor = !isBuffer(value) && value?.data !== undefined;
    const data = tensor ? value.data : value, tag = data?.[Symbol.toStringTag];
    const fits = [TYPES[dtype].name, ALSO[dtype] ?? ''].includes(tag);
    if (!isBuffer(data) && !fits) {
      throw wrong(`input ${name} is ${data === undefined ? 'missing' : tag ?? typeof data}; pass a `
        + `${TYPES[dtype].name} of shape ${show(form)}`);
    }
    const shape = tensor && value.shape ? [...value.shape] : form;
    if (shape.some(Array.isArray)) {
      throw wrong(`input ${name} has open dimensions: pass {data, shape} with a shape like `
        + show(form));
    }
    if (shape.length !== form.length) {
      throw wrong(`input ${name} has shape ${show(shape)} but must have ${show(form)}`);
    }
    return {name, data, shape, form, size: TYPES[dtype].BYTES_PER_ELEMENT};
  });
  const symbols = {};
  for (const [name, [low, high, port, axis, factor, offset]] of Object.entries(model.symbols)) {
    const value = (given[port].shape[axis] - offset) / factor;
    if (!Number.isInteger(value) || value < low || value > high) {
      throw wrong(`input ${given[port].name} has shape ${show(given[port].shape)}, and ${name} `
        + `must be in ${low}..${high}`);
    }
    symbols[name] = value;
  }
  for (const {name, data, shape, form, size} of given) {
    const expected = form.map(d => evaluate(d, symbols)), count = product(expected);
    if (shape.some((d, i) => d !== expected[i])) {
      throw wrong(`input ${name} has shape ${show(shape)} but must have ${show(expected)}`);
    }
    if (isBuffer(data) ? data.size < count * size : data.length !== count) {
      const [has, must, unit] = isBuffer(data) ? [data.size, count * size, 'bytes']
        : [data.length, count, 'elements'];
      throw wrong(`input ${name} has ${has} ${unit} but must have ${must} for ${show(expected)}`);
    }
  }
  const shapes = model.outputs.map(p => p.shape.map(d => evaluate(d, symbols)));
  if (shapes.some(shape => shape.some(d => d < 0))) throw wrong('an output would be empty');
  return {arrays: given.map(g => g.data), symbols, shapes};
}

/** Bytes of an output, and the typed array that it becomes. */
export function outputArray(port, shape, buffer, offset) {
  const Type = TYPES[port.dtype];
  return new Type(new Type(buffer, offset, product(shape))); // a copy, never shared
}
export const outputBytes = (port, shape) => product(shape) * TYPES[port.dtype].BYTES_PER_ELEMENT;

/** The array of zeros, or the same numbers in every language from a seed: see web/vector.py. */
function made(port, shape, seed) {
  const out = new TYPES[port.dtype](product(shape)), {dtype} = port;
  if (seed === undefined) return out;
  for (let i = 0; i < out.length; i++) {
    let x = i + Math.imul(seed, 0x9e3779b9) | 0;
    x = Math.imul(x ^ x >>> 16, 0x7feb352d);
    x = Math.imul(x ^ x >>> 15, 0x846ca68b);
    x = (x ^ x >>> 16) >>> 24;
    if (dtype === 'float16') {
      // (x - 128) / 128, a sum of powers of two
      const value = Math.abs(x - 128), power = 31 - Math.clz32(value);
      out[i] = value ? (x < 128 ? 0x8000 : 0) | power + 8 << 10 | value * 2 ** (10 - power) & 1023 : 0;
    } else if (dtype.startsWith('float')) {
      out[i] = (x - 128) / 128;
    } else {
      x = dtype === 'bool' ? x & 1 : x % 10;
      out[i] = dtype.endsWith('int64') ? BigInt(x) : x;
    }
  }
  return out;
}

// the model

/** A loaded model; its methods are described in index.d.ts. */
class Model {
  #model; #backend; #context; #last; #waiting = 0; #closed = false;

  constructor(model, backend, context, info) {
    this.#model = model;
    this.#backend = backend;
    this.#context = context;
    this.info = info;
  }

  async run(inputs, {outputs = 'cpu'} = {}) {
    const call = checked(this.#model, inputs, this.#backend.isBuffer);
    if (this.#waiting) {
      call.arrays = call.arrays.map(a => this.#backend.isBuffer(a) ? a : a.slice());
    }
    return this.#turn(() => this.#outputs(call, outputs));
  }

  async warmup() {
    await this.#turn(() => this.#trial());
  }

  async selfTest() {
    const {test} = this.#model;
    if (!test) {
      throw new TinyedgeError('unsupported', 'the bundle has no test vector; export it from the '
        + 'ONNX model');
    }
    const {symbols, outputs} = JSON.parse(
      new TextDecoder().decode(await whole(test, {...this.#context, advance() {}})));
    const got = await this.#turn(() => this.#trial(symbols));
    const {tolerance} = this.#context;
    let error = 0;
    this.#model.outputs.forEach(({name}, i) => {
      const {stride, values} = outputs[i];
      let largest = 1e-30, off = 0;
      values.forEach((value, j) => {
        if (value === null) return; // neither side promises what is not finite
        const difference = Math.abs(Number(got[name].data[j * stride]) - value);
        off = difference <= off ? off : difference; // a NaN is kept
        largest = Math.max(largest, Math.abs(value));
      });
      error = off / largest <= error ? error : off / largest;
    });
    return {passed: error <= tolerance, error, tolerance};
  }

  async reset() {
    await this.#turn(() => this.#backend.reset());
  }

  async dispose() {
    if (this.#closed) return;
    await this.#turn(() => { this.#closed = true; return this.#backend.dispose(); });
  }

  /** One run on made inputs, with the states as they are at first before it and after it. */
  async #trial(symbols) {
    const {inputs, symbols: open} = this.#model;
    const known = symbols ?? Object.fromEntries(Object.entries(open).map(([k, [low]]) => [k, low]));
    const feeds = Object.fromEntries(inputs.map((port, i) => {
      const shape = port.shape.map(d => evaluate(d, known));
      return [port.name, {data: made(port, shape, symbols && i), shape}];
    }));
    const call = checked(this.#model, feeds, this.#backend.isBuffer);
    await this.#backend.reset();
    const result = await this.#outputs(call, 'cpu');
    await this.#backend.reset();
    return result;
  }

  async #outputs(call, wanted) {
    const data = await this.#backend.run(call, wanted);
    return Object.fromEntries(this.#model.outputs.map(
      (port, i) => [port.name, {data: data[i], shape: call.shapes[i]}]));
  }

  /** Runs are one after another: the model's memory is there once. An idle model starts at once. */
  async #turn(work) {
    const before = this.#last;
    let end;
    this.#last = new Promise(resolve => { end = resolve; });
    this.#waiting++;
    try {
      if (this.#waiting > 1) await before;
      if (this.#closed) throw new TinyedgeError('disposed', 'the model is disposed of; load it again');
      return await work();
    } finally {
      this.#waiting--;
      end();
    }
  }
}

/** Loads a model on the first of the back ends that the machine has. */
async function loadModel(model, backends, options = {}) {
  const {device = 'auto', onProgress, signal, cache = false, baseUrl} = options;
  signal?.throwIfAborted();
  const names = typeof device === 'object' ? ['webgpu'] :
    device === 'auto' ? Object.keys(backends) : [device];
  let choice, kind;
  const reasons = [];
  for (kind of names) {
    if (!backends[kind]) {
      throw wrong(`the bundle has no back end ${kind}; it has ${Object.keys(backends).join(', ')}`);
    }
    choice = await backends[kind].select(model.plans[kind], options);
    if (typeof choice === 'object') break;
    reasons.push(`${kind}: ${choice}`);
  }
  if (typeof choice !== 'object') {
    throw new TinyedgeError('unsupported', `the model can't run here; ${reasons.join('; ')}`);
  }
  const files = [...choice.plan.files].map(i => model.files[i]);
  const total = files.reduce((sum, f) => sum + f.size, 0);
  let loaded = 0;
  const context = {
    signal, chunk: model.chunk, tolerance: choice.plan.tolerance,
    baseUrl: baseUrl && new URL(baseUrl, globalThis.location?.href), stores: [],
    cache: cache ? await globalThis.caches?.open(cache === true ? 'tinyedge' : cache) : undefined,
    advance(bytes) { loaded += bytes; onProgress?.({loaded, total}); },
  };
  onProgress?.({loaded, total});
  try {
    const backend = await backends[kind].open(choice, model, files, context);
    await Promise.all(context.stores);
    signal?.throwIfAborted();
    const {name, inputs, outputs, metadata} = model;
    return new Model(model, backend, context, {
      name, device: kind, bytes: total, inputs, outputs, metadata, target: choice.plan.target,
      verified: !!globalThis.crypto?.subtle, ...backend.info,
    });
  } catch (error) {
    choice.release?.();
    throw error;
  }
}
