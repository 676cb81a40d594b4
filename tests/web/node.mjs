/** What is checked in Node: `node node.mjs FOLDER` prints a line of JSON for each check. */

import {fakeDevice} from './fake_gpu.mjs';
import {pathToFileURL} from 'node:url';
import {join} from 'node:path';

const COUNT = 3 << 16;
const root = process.argv[2];
const bundle = name => import(pathToFileURL(join(root, name, 'index.js')));
const error = promise => promise.then(() => 'nothing', e => ({name: e.name, code: e.code, message: e.message}));

const checks = {
  async 'objects of a second run'() {
    const {load} = await bundle('hand');
    const device = fakeDevice();
    const model = await load({device});
    const x = new Float32Array(COUNT);
    const first = {...device.counts};
    await model.run({x});
    const second = {...device.counts};
    await model.run({x});
    const own = device.createBuffer({size: 4 * COUNT, usage: 0x80 | 4 | 8});
    const out = device.createBuffer({size: 4 * COUNT, usage: 0x80 | 4 | 8});
    const before = {...device.counts};
    const given = await model.run({x: own}, {outputs: {y: out}});
    const between = {...device.counts};
    await model.run({x: own}, {outputs: {y: out}});
    const after = {...device.counts};
    await model.dispose();
    return {first, second, before, between, after, same: given.y.data === out,
      kept: !device.destroyed, disposed: await error(model.run({x}))};
  },

  async 'control flow and symbols'() {
    const {load} = await bundle('open');
    const device = fakeDevice();
    const model = await load({device});
    const run = n => model.run({x: {data: new Float32Array(2 * n), shape: [n, 2]}});
    const shapes = [];
    for (const n of [1, 5, 7]) shapes.push((await run(n)).y.shape);
    return {shapes, dispatches: device.counts.dispatch, buffers: device.counts.buffer,
      out: await error(run(9)), plain: await error(model.run({x: new Float32Array(4)})),
      rank: await error(model.run({x: {data: new Float32Array(4), shape: [4]}}))};
  },

  async 'limits'() {
    const {load} = await bundle('hand');
    const tight = fakeDevice({limits: {maxStorageBufferBindingSize: 4096}});
    return {tight: await error(load({device: tight})), none: await error(load({device: 'webgpu'})),
      absent: await error(load({device: 'wasm'}))};
  },

  async 'half precision'() {
    const {load} = await bundle('half');
    const targets = {};
    for (const features of [[], ['shader-f16']]) {
      targets[features] = (await load({device: fakeDevice({features})})).info.target;
    }
    return targets;
  },

  async 'open dimensions on WebAssembly'() {
    const {load} = await bundle('rows');
    const model = await load(), runs = [];
    for (const n of [3, 1, 8]) {
      const data = Float32Array.from({length: 2 * n}, (_, i) => i - n);
      const {y} = await model.run({x: {data, shape: [n, 2]}});
      runs.push({x: [...data], y: [...y.data], shape: y.shape});
    }
    return {runs, test: await model.selfTest(), warm: await error(model.warmup()),
      out: await error(model.run({x: {data: new Float32Array(18), shape: [9, 2]}}))};
  },

  async 'a device that is lost'() {
    const {load} = await bundle('hand');
    const device = fakeDevice(), x = new Float32Array(COUNT);
    const model = await load({device});
    await model.run({x});
    const running = error(model.run({x}));
    device.lose('the driver was reset');
    const during = await running, after = await error(model.run({x}));
    const again = await load({device: fakeDevice()});
    return {during, after, again: (await again.run({x})).y.data.length};
  },

  async 'threads'() {
    const {load} = await bundle('threaded');
    const x = Float32Array.from({length: COUNT}, (_, i) => Math.sin(i)), out = {};
    for (const threads of [1, 3]) {
      const events = [];
      const model = await load({threads, onProgress: p => events.push(p)});
      const runs = await Promise.all([model.run({x}), model.run({x})]);
      await model.reset();
      runs.push(await model.run({x}));
      out[threads] = {info: model.info, events, marks: [...runs[0].marks.data],
        values: runs.map(r => Array.from({length: 64}, (_, i) => r.y.data[i * 3001])),
        gpu: await error(model.run({x}, {outputs: 'gpu'})),
        test: await error(model.selfTest())};
      await model.dispose();
      out[threads].disposed = await error(model.run({x}));
    }
    out.none = await error(load({threads: 0}));
    return out;
  },
};

for (const [name, check] of Object.entries(checks)) {
  let result;
  try { result = {value: await check()}; } catch (e) { result = {error: e.stack}; }
  console.log(JSON.stringify({name, ...result}));
}
