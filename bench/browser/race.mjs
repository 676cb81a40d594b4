/**
 * Races bundles against onnxruntime-web in one page of headless Chromium:
 * `node race.mjs FOLDER BACKEND THREADS RUNS LOADS NAME...` prints a line of JSON for each network.
 * FOLDER/NAME holds bundle/, model.onnx and feeds.json: [{name, dtype, shape, file, state}].
 */

import {cp, mkdir} from 'node:fs/promises';
import {join} from 'node:path';
import {fileURLToPath} from 'node:url';
import {launch} from '../../tests/web/browser.mjs';
import {serve} from '../../tests/web/server.mjs';

const [root, backend, threads, runs, loads, ...names] = process.argv.slice(2);
const dist = fileURLToPath(new URL('./node_modules/onnxruntime-web/dist', import.meta.url));
await mkdir(join(root, 'ort'), {recursive: true});
await cp(dist, join(root, 'ort'), {recursive: true, filter: path => !path.endsWith('.map')});

const server = await serve(root);
const browser = await launch();

async function fresh(work, argument) {
  const context = await browser.newContext();
  const page = await context.newPage();
  page.setDefaultTimeout(0);
  try {
    await page.goto(`${server.origin}/isolated/empty.html`);
    await page.evaluate(helpers, {backend, threads: Number(threads)});
    return await page.evaluate(work, argument);
  } finally {
    await context.close();
  }
}

function helpers({backend, threads}) {
  const TYPES = {float32: Float32Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array};
  const base = '/isolated/';
  window.feeds = async name => {
    const list = await (await fetch(`${base}${name}/feeds.json`)).json();
    for (const feed of list) {
      const bytes = await (await fetch(`${base}${name}/${feed.file}`)).arrayBuffer();
      feed.data = new TYPES[feed.dtype](bytes);
    }
    return list;
  };
  window.ours = async (name, list) => {
    const {load} = await import(`${base}${name}/bundle/index.js`);
    const model = await load({device: backend, threads});
    const inputs = Object.fromEntries(list.filter(f => !f.state).map(
      f => [f.name, {data: f.data, shape: f.shape}]));
    return {run: () => model.run(inputs), model};
  };
  window.theirs = async (name, list) => {
    const file = backend === 'wasm' ? 'ort.wasm.bundle.min.mjs' : 'ort.webgpu.bundle.min.mjs';
    const ort = await import(`${base}ort/${file}`);
    ort.env.wasm.wasmPaths = new URL(`${base}ort/`, location.href).href;
    ort.env.wasm.numThreads = threads;
    ort.env.logLevel = 'error';
    const session = await ort.InferenceSession.create(`${base}${name}/model.onnx`,
      {executionProviders: [backend], graphOptimizationLevel: 'all'});
    const inputs = () => Object.fromEntries(list.map(
      f => [f.name, new ort.Tensor(f.dtype, f.data, f.shape)]));
    return {run: () => session.run(inputs()), session};
  };
}

async function race({name, runs}) {
  const list = await feeds(name);
  const a = await ours(name, list), b = await theirs(name, list);
  const clock = async run => {
    const before = performance.now();
    await run();
    return performance.now() - before;
  };
  await a.model.reset();
  const [got, expected] = [await a.run(), await b.run()];
  let error = 0;
  for (const [key, {data}] of Object.entries(got)) {
    const other = expected[key].data;
    let off = 0, largest = 1e-30;
    for (let i = 0; i < data.length; i++) {
      off = Math.max(off, Math.abs(Number(data[i]) - Number(other[i])));
      largest = Math.max(largest, Math.abs(Number(other[i])));
    }
    error = Math.max(error, off / largest);
  }
  if (runs > 10) for (let i = 0; i < 3; i++) { await a.run(); await b.run(); }
  const times = [[], []];
  for (let i = 0; i < runs; i++) {
    for (const [j, side] of [a, b].entries()) {
      await new Promise(resolve => setTimeout(resolve, 30)); // for the other's threads, which still spin
      times[j].push(await clock(side.run));
    }
  }
  return {error, times, info: a.model.info};
}

// Arrow functions: a named one would be what it calls, once it is in the page.
const first = [
  async name => {
    const list = await feeds(name), before = performance.now();
    await (await ours(name, list)).run();
    return performance.now() - before;
  },
  async name => {
    const list = await feeds(name), before = performance.now();
    await (await theirs(name, list)).run();
    return performance.now() - before;
  },
];

for (const name of names) {
  let result;
  try {
    result = await fresh(race, {name, runs: Number(runs)});
    result.loads = [[], []];
    for (let i = 0; i < Number(loads); i++) {
      for (const [j, work] of first.entries()) result.loads[j].push(await fresh(work, name));
    }
  } catch (error) {
    result = {failure: error.message.split('\n')[0]};
  }
  console.log(JSON.stringify({name, ...result}));
}
await browser.close();
server.close();
