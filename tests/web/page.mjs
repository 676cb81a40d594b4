/**
 * What is checked in headless Chromium: `node page.mjs FOLDER [SCENARIO...]` prints a line of JSON
 * for each scenario. FOLDER holds bundles by name, a picture, and gets screenshots.
 */

import {readFile} from 'node:fs/promises';
import {join} from 'node:path';
import {launch} from './browser.mjs';
import {built} from './bundlers.mjs';
import {serve} from './server.mjs';

const [root, ...wanted] = process.argv.slice(2);
const DEADLINE = 20_000;
const server = await serve(root);
const browser = await launch(['--use-fake-device-for-media-stream',
  '--use-fake-ui-for-media-stream', '--host-resolver-rules=MAP plain.test 127.0.0.1']);

/** Calls work(page) in a visitor's fresh browser, at an empty page served with these modes. */
async function visit(modes, work, settings = {}) {
  const context = await browser.newContext(settings);
  context.setDefaultTimeout(DEADLINE);
  const page = await context.newPage();
  const problems = [];
  page.on('console', message => {
    if (['error', 'warning'].includes(message.type())) problems.push(message.text());
  });
  page.on('pageerror', error => problems.push(error.message));
  try {
    await page.goto(`${server.origin}/${modes}/empty.html`);
    await page.evaluate(helpers);
    const value = await work(page, context, problems);
    return value;
  } finally {
    await context.close();
  }
}

/** What pages use in their scenarios. */
function helpers() {
  const modes = location.pathname.split('/')[1];
  window.bundle = (name, other = modes) => import(`/${other}/${name}/index.js`);
  window.failure = promise => promise.then(() => 'nothing',
    e => ({name: e.name, code: e.code, message: e.message}));
  window.input = (n, f = i => Math.sin(i)) => Float32Array.from({length: n}, (_, i) => f(i));
  window.COUNT = 3 << 16;
}

const scenarios = {
  async progress() {
    const out = {};
    for (const modes of ['plain', 'chunked', 'gzip', 'gzip+chunked']) {
      const before = {...server.counts};
      const events = await visit(modes, page => page.evaluate(async () => {
        const events = [];
        const {load} = await bundle('many');
        await load({onProgress: p => events.push(p)});
        return events;
      }));
      const fetched = Object.keys(server.counts).filter(f => f.startsWith('many/'))
        .map(f => server.counts[f] - (before[f] ?? 0));
      out[modes] = {events, fetched};
    }
    return out;
  },

  recurrent: () => visit('csp', page => page.evaluate(async () => {
    const out = {};
    for (const name of ['hand', 'hand8', 'many']) {
      const {load} = await bundle(name);
      const model = await load(), x = input(COUNT);
      const one = await model.run({x});
      const [two, three] = await Promise.all([model.run({x}), model.run({x})]);
      await model.reset();
      const again = await model.run({x});
      const pick = r => Array.from({length: 64}, (_, i) => r.y.data[i * 3001]);
      out[name] = {info: model.info, runs: [one, two, three, again].map(pick)};
      await model.dispose();
    }
    return out;
  })),

  branching: () => visit('plain', page => page.evaluate(async () => {
    const {load} = await bundle('open');
    const model = await load(), runs = [];
    for (const shape of [[3, 2], [8, 2], [1, 2]]) {
      for (const sign of [1, -1]) {
        const data = input(shape[0] * 2, i => sign * (i + 1));
        const {y} = await model.run({x: {data, shape}});
        runs.push({x: [...data], shape: y.shape, y: [...y.data]});
      }
    }
    return runs;
  })),

  async broken() {
    const out = {};
    for (const modes of ['damaged', 'short', 'damaged+gzip']) {
      out[modes] = await visit('plain', page => page.evaluate(async modes => {
        const {load} = await bundle('hand', modes);
        return failure(load());
      }, modes));
    }
    out.absent = await visit('plain', page => page.evaluate(async () => {
      const {load} = await bundle('hand');
      return failure(load({baseUrl: '/plain/nowhere/'}));
    }));
    out.unreachable = await visit('plain', page => page.evaluate(async () => {
      const {load} = await bundle('hand');
      return failure(load({baseUrl: 'http://127.0.0.1:9/'}));
    }));
    return out;
  },

  abort: () => visit('slow', page => page.evaluate(async () => {
    const {load} = await bundle('hand');
    const stop = new AbortController();
    let loaded = 0, total;
    const stopped = await failure(load({signal: stop.signal, onProgress: p => {
      ({loaded, total} = p);
      if (loaded > total / 3) stop.abort();
    }}));
    const before = await failure(load({signal: stop.signal}));
    const model = await load();
    const {y} = await model.run({x: input(COUNT)});
    return {stopped, before, share: loaded / total, again: y.data.length};
  })),

  lost: () => visit('plain', page => page.evaluate(async () => {
    const {load} = await bundle('hand');
    const adapter = await navigator.gpu.requestAdapter(), device = await adapter.requestDevice();
    const x = input(COUNT), model = await load({device});
    const whole = (await model.run({x})).y.data[5];
    const running = failure(model.run({x}));
    device.destroy();
    const during = await running, after = await failure(model.run({x}));
    const again = await load();
    return {during, after, whole, again: (await again.run({x})).y.data[5]};
  })),

  cached: () => visit('kept', async (page, context) => {
    const first = () => page.evaluate(async () => {
      const {load} = await bundle('hand');
      const model = await load({cache: true});
      return (await model.run({x: input(COUNT)})).y.data[5];
    });
    const online = await first(), count = server.counts['hand/weights-0.bin'];
    await context.setOffline(true);
    const second = await context.newPage();
    await second.goto(page.url());
    await second.evaluate(helpers);
    const offline = await second.evaluate(async () => {
      const {load} = await bundle('hand');
      const model = await load({cache: true});
      const without = await failure(load());
      return {value: (await model.run({x: input(COUNT)})).y.data[5], without};
    });
    await context.setOffline(false);
    const spoiled = await second.evaluate(async () => {
      const store = await caches.open('tinyedge'), [key] = await store.keys();
      const bytes = new Uint8Array(await (await store.match(key)).arrayBuffer());
      bytes[9] ^= 1;
      await store.put(key, new Response(bytes));
      const {load} = await bundle('hand');
      const first = await failure(load({cache: true}));
      const model = await load({cache: true});
      return {first, again: (await model.run({x: input(COUNT)})).y.data[5],
        kept: (await store.keys()).length};
    });
    return {online, offline, spoiled, fetched: server.counts['hand/weights-0.bin'] - count};
  }),

  wrong: () => visit('plain', page => page.evaluate(async () => {
    const {load} = await bundle('hand');
    const model = await load(), x = input(COUNT);
    return Promise.all([
      {y: x}, {}, {x: [1, 2]}, {x: new Float64Array(COUNT)}, {x: new Float32Array(5)}, {x, h: x},
      {x: {data: x, shape: [1, COUNT]}}, {x: null}, null, {x: 5},
    ].map(inputs => failure(model.run(inputs))).concat(
      failure(model.run({x}, {outputs: 'tpu'})), failure(model.run({x}, {outputs: {z: x}})),
      failure(model.run({x}, {outputs: {y: x}})), failure(load({device: 'tpu'}))));
  })),

  buffers: () => visit('plain', page => page.evaluate(async () => {
    const {load} = await bundle('hand');
    const adapter = await navigator.gpu.requestAdapter(), device = await adapter.requestDevice();
    const problems = [];
    device.addEventListener('uncapturederror', e => problems.push(e.error.message));
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const make = () => device.createBuffer({size: 4 * COUNT, usage});
    const x = input(COUNT), from = make(), to = make();
    device.queue.writeBuffer(from, 0, x);
    const read = async buffer => {
      const staging = device.createBuffer({size: 4 * COUNT, usage: 9});
      const encoder = device.createCommandEncoder();
      encoder.copyBufferToBuffer(buffer, 0, staging, 0, 4 * COUNT);
      device.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      return new Float32Array(staging.getMappedRange())[5];
    };
    const model = await load({device});
    const cpu = (await model.run({x})).y.data[5];
    await model.reset();
    const kept = await model.run({x: from}, {outputs: 'gpu'});
    const own = await read(kept.y.data);
    await model.reset();
    const given = await model.run({x: from}, {outputs: {y: to}});
    const theirs = await read(given.y.data);
    const same = await failure(model.run({x: from}, {outputs: {y: from}}));
    const bare = device.createBuffer({size: 4 * COUNT, usage: GPUBufferUsage.COPY_DST});
    const usages = await failure(model.run({x: bare}));
    await model.dispose();
    const alive = await read(to);
    return {cpu, own, theirs, alive, isTo: given.y.data === to, same, usages, problems};
  })),

  /** WebAssembly with and without threads. */
  async threads() {
    const out = {};
    for (const modes of ['csp', 'csp+isolated']) {
      out[modes] = await visit(modes, (page, context, problems) => page.evaluate(async () => {
        const {load} = await bundle('threaded');
        const model = await load({threads: 2}), x = input(COUNT);
        const {y, marks} = await model.run({x});
        const stopped = new AbortController();
        const again = load({threads: 2, signal: stopped.signal});
        stopped.abort();
        const aborted = await failure(again);
        await model.dispose();
        return {info: model.info, marks: [...marks.data], aborted,
          y: Array.from({length: 64}, (_, i) => y.data[i * 3001])};
      }).then(value => ({...value, problems: [...problems]})));
    }
    return out;
  },

  /** The model in a worker, from the page's side. */
  worker: () => visit('csp', page => page.evaluate(async () => {
    const {connect} = await import('/csp/hand/remote.js');
    const start = () => new Worker('/csp/hand/worker.js', {type: 'module'});
    const events = [], x = input(COUNT);
    const model = await connect(start(), {onProgress: p => events.push(p)});
    const [one, two] = await Promise.all([model.run({x}), model.run({x})]);
    await model.reset();
    const again = await model.run({x}), wrong = await failure(model.run({z: x}));
    await model.dispose();
    const {connect: slow} = await import('/slow/hand/remote.js');
    const stop = new AbortController();
    const stopped = await failure(slow(new Worker('/slow/hand/worker.js', {type: 'module'}),
      {signal: stop.signal, onProgress: ({loaded}) => loaded && stop.abort()}));
    const threads = await import('/csp/threaded/remote.js').then(({connect: on}) =>
      on(new Worker('/csp/threaded/worker.js', {type: 'module'})));
    const wasm = (await threads.run({x})).y.data[5];
    const absent = await failure(connect(new Worker('/csp/nowhere.js', {type: 'module'})));
    return {info: model.info, events, values: [one, two, again].map(r => r.y.data[5]), wrong,
      stopped, absent, wasm, kept: x.length};
  })),

  /** Pages built by bundlers without a plugin. */
  async bundlers() {
    const out = {};
    const names = await built(root);
    for (const [name, path] of Object.entries(names)) {
      out[name] = await visit('csp', async (page, context, problems) => {
        await page.goto(`${server.origin}/csp+isolated/${path}/index.html`);
        await page.waitForFunction(() => document.title !== 'waiting');
        return {title: await page.title(), problems: [...problems]};
      });
    }
    return out;
  },

  /** The demo page of a classifier: a picture is chosen, dropped, and taken by the camera. */
  async picture() {
    const out = {};
    for (const scheme of ['light', 'dark']) {
      out[scheme] = await visit('csp', async (page, context, problems) => {
        await demo(page, 'colours');
        await page.setInputFiles('#file', join(root, 'red.png'));
        await page.waitForSelector('#top li');
        const chosen = await read(page);
        await drop(page, 'blue.png');
        await page.waitForFunction(() => /blue/.test(document.querySelector('#top li').textContent));
        const dropped = await read(page);
        await page.keyboard.press('Tab');
        const focus = [];
        for (let i = 0; i < 3; i++) {
          focus.push(await page.evaluate(() => document.activeElement.id));
          await page.keyboard.press('Tab');
        }
        const before = dropped.latency;
        await page.click('#camera');
        await page.waitForSelector('#video:not([hidden])');
        await page.waitForFunction(t => document.querySelector('#latency').textContent !== t, before);
        const camera = await page.getAttribute('#camera', 'aria-pressed');
        await page.click('#camera');
        const paper = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
        return {chosen, dropped, focus, camera, paper, problems: [...problems]};
      }, {colorScheme: scheme, permissions: ['camera']});
    }
    return out;
  },

  /** A photograph on the page of a real network, in both colour schemes. */
  async photograph() {
    const out = {};
    for (const [scheme, modes] of [['light', 'csp'], ['dark', 'csp+isolated']]) {
      out[scheme] = await visit(modes, async (page, context, problems) => {
        await demo(page, 'lite', modes);
        await page.setInputFiles('#file', join(root, 'cat.png'));
        await page.waitForSelector('#top li');
        await page.screenshot({path: join(root, `demo-${scheme}.png`)});
        return {...await read(page), problems: [...problems]};
      }, {colorScheme: scheme, viewport: {width: 760, height: 1000}, deviceScaleFactor: 1});
    }
    return out;
  },

  /** The test vectors of real networks. */
  selfTests: () => visit('csp+isolated', page => page.evaluate(async () => {
    const out = {};
    for (const name of ['lite', 'lite8', 'lite16', 'voice', 'filters-float32', 'filters-float16', 'filters-int8']) {
      const {load} = await bundle(name);
      for (const threads of [1, 2]) {
        const model = await load({threads});
        out[`${name} ${threads}`] = {...await model.selfTest(), ...model.info};
        await model.dispose();
      }
    }
    return out;
  })),

  /** The demo page of what is no classifier, and of a download that fails at first. */
  async form() {
    return visit('csp', async (page, context, problems) => {
      await demo(page, 'open');
      await page.click('#random');
      await page.waitForSelector('#outputs li');
      const inputs = await page.textContent('#inputs'), outputs = await page.textContent('#outputs');
      const seen = [...problems];
      let broken = true;
      await page.route('**/*.bin', route => broken ? route.abort() : route.continue());
      await page.goto(`${server.origin}/csp/hand/index.html`);
      await page.waitForSelector('#again:not([hidden])');
      const failed = await page.textContent('#status');
      broken = false;
      await page.click('#again');
      await page.waitForFunction(() => document.body.dataset.state === 'ready');
      return {inputs, outputs, failed, problems: seen};
    });
  },

  /** A page that came over plain http from another machine: no crypto.subtle, no caches, no GPU. */
  insecure: () => visit('plain', async page => {
    await page.goto(page.url().replace('127.0.0.1', 'plain.test'));
    await page.evaluate(helpers);
    return page.evaluate(async () => {
      const {load} = await bundle('hand');
      const {load: loadWasm} = await bundle('threaded');
      const model = await loadWasm({cache: true});
      const {y} = await model.run({x: input(COUNT)});
      return {secure: isSecureContext, gpu: await failure(load()), info: model.info, y: y.data[5]};
    });
  }),
};

async function demo(page, name, modes = 'csp') {
  await page.goto(`${server.origin}/${modes}/${name}/index.html`);
  await page.waitForFunction(() => document.body.dataset.state);
  const state = await page.evaluate(() => [document.body.dataset.state, document.querySelector('#status').textContent]);
  if (state[0] !== 'ready') throw new Error(state[1]);
}

const read = page => page.evaluate(() => ({
  top: [...document.querySelectorAll('#top li')].map(li => [...li.querySelectorAll('span:not(.bar)')]
    .map(span => span.textContent)),
  bars: [...document.querySelectorAll('#top .bar')].map(bar => parseFloat(bar.style.width) / 100),
  latency: document.querySelector('#latency').textContent,
  device: document.querySelector('#device').textContent,
  bytes: document.querySelector('#bytes').textContent,
}));

async function drop(page, file) {
  const data = await readFile(join(root, file), 'base64');
  const transfer = await page.evaluateHandle(async ({data, file}) => {
    const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0)), transfer = new DataTransfer();
    transfer.items.add(new File([bytes], file, {type: 'image/png'}));
    return transfer;
  }, {data, file});
  await page.dispatchEvent('#drop', 'dragover', {dataTransfer: transfer});
  await page.dispatchEvent('#drop', 'drop', {dataTransfer: transfer});
}

for (const [name, work] of Object.entries(scenarios)) {
  if (wanted.length && !wanted.includes(name)) continue;
  let result;
  const start = performance.now();
  try { result = {value: await work()}; } catch (e) { result = {error: e.stack ?? String(e)}; }
  const seconds = (performance.now() - start) / 1e3;
  console.log(JSON.stringify({name, seconds, ...result}));
}
await browser.close();
server.close();
