/** The page: loads the model, shows how far that is, and runs it on a picture or random inputs. */

import {load} from './index.js';
import {settings} from './settings.js';

const $ = id => document.getElementById(id);
const show = (id, on = true) => { $(id).hidden = !on; };
const wanted = new URLSearchParams(location.search);
const TOP = 5;

let model, abort, source, busy = false, stream;

const amount = n => n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : `${(n / 1e6).toFixed(1)} MB`;
const say = text => { $('status').textContent = text; };

async function start() {
  abort?.abort();
  abort = new AbortController();
  model = undefined;
  show('loading');
  show('again', false);
  show('progress');
  say('Loading the model…');
  try {
    model = await load({
      device: wanted.get('device') ?? 'auto',
      threads: wanted.has('threads') ? Number(wanted.get('threads')) : undefined,
      cache: true,
      signal: abort.signal,
      onProgress({loaded, total}) {
        $('progress').value = total ? loaded / total : 1;
        $('amount').textContent = `${amount(loaded)} of ${amount(total)}`;
      },
    });
    say('Getting ready…');
    await model.warmup();
  } catch (error) {
    return failed(error);
  }
  const {device, threads, adapter, bytes} = model.info;
  $('device').textContent = device === 'webgpu' ? `WebGPU${adapter ? ` (${adapter})` : ''}`
    : `WebAssembly, ${threads} thread${threads > 1 ? 's' : ''}`;
  $('bytes').textContent = amount(bytes);
  show('loading', false);
  show(settings.picture ? 'picture' : 'form');
  document.body.dataset.state = 'ready';
  if (source) await classify(source);
}

function failed(error) {
  document.body.dataset.state = 'failed';
  say(error.message);
  show('loading');
  show('progress', false);
  show('again');
}

async function timed(inputs) {
  const before = performance.now();
  const outputs = await model.run(inputs);
  $('latency').textContent = `${(performance.now() - before).toFixed(1)} ms`;
  return outputs;
}

// pictures

/** A picture's middle as the model's input. */
function pixels(drawable, width, height) {
  const p = settings.picture, scale = Math.min(width / p.width, height / p.height) * p.crop;
  const w = p.width * scale, h = p.height * scale;
  const canvas = new OffscreenCanvas(p.width, p.height);
  const context = canvas.getContext('2d', {willReadFrequently: true});
  context.imageSmoothingQuality = 'high';
  context.drawImage(drawable, (width - w) / 2, (height - h) / 2, w, h, 0, 0, p.width, p.height);
  const {data} = context.getImageData(0, 0, p.width, p.height);
  const count = p.width * p.height, {dtype} = model.info.inputs[0];
  const out = new (dtype === 'uint8' ? Uint8Array : Float32Array)(count * p.channels);
  for (let c = 0; c < p.channels; c++) {
    const mean = p.mean[c] ?? p.mean[0], std = p.std[c] ?? p.std[0];
    for (let i = 0; i < count; i++) {
      const value = p.channels === 3 ? data[i * 4 + c]
        : 0.299 * data[i * 4] + 0.587 * data[i * 4 + 1] + 0.114 * data[i * 4 + 2];
      out[p.first ? c * count + i : i * p.channels + c] = (value - mean) / std;
    }
  }
  return out;
}

async function classify(drawable) {
  if (!model || busy) return;
  busy = true;
  try {
    const {input, output} = settings.picture;
    const width = drawable.videoWidth || drawable.width, height = drawable.videoHeight || drawable.height;
    const scores = (await timed({[input]: pixels(drawable, width, height)}))[output].data;
    list(scores);
  } catch (error) {
    if (error.code !== 'lost') return failed(error);
    busy = false;
    await start(); // the device is gone, the picture is not
  } finally {
    busy = false;
  }
}

function list(scores) {
  let shares = Array.from(scores);
  const sum = shares.reduce((a, b) => a + b, 0);
  if (Math.min(...shares) < 0 || Math.abs(sum - 1) > 0.01) {
    const most = Math.max(...shares);
    shares = shares.map(x => Math.exp(x - most));
    const all = shares.reduce((a, b) => a + b, 0);
    shares = shares.map(x => x / all);
  }
  const order = shares.map((share, i) => [share, i]).sort((a, b) => b[0] - a[0]).slice(0, TOP);
  $('top').replaceChildren(...order.map(([share, i]) => {
    const item = document.createElement('li'), bar = document.createElement('span');
    const name = document.createElement('span'), figure = document.createElement('span');
    bar.className = 'bar';
    bar.style.width = `${share * 100}%`;
    name.textContent = settings.labels[i] ?? `class ${i}`;
    figure.textContent = `${(share * 100).toFixed(1)} %`;
    figure.className = 'figures';
    item.append(bar, name, figure);
    return item;
  }));
  show('results');
}

async function take(file) {
  if (!file) return;
  stopCamera();
  try {
    source = await createImageBitmap(file);
  } catch {
    $('hint').querySelector('p').textContent = `${file.name} is no picture that this browser can read`;
    source = undefined;
    show('canvas', false);
    show('hint');
    return;
  }
  const canvas = $('canvas');
  canvas.width = source.width;
  canvas.height = source.height;
  canvas.getContext('2d').drawImage(source, 0, 0);
  show('hint', false);
  show('canvas');
  $('drop').classList.add('full');
  await classify(source);
}

async function camera() {
  if (stream) return stopCamera();
  try {
    stream = await navigator.mediaDevices.getUserMedia({video: {facingMode: 'environment'}});
  } catch (error) {
    show('hint');
    $('hint').querySelector('p').textContent = `The camera can't be used: ${error.message}`;
    return;
  }
  const video = $('video');
  video.srcObject = stream;
  await video.play();
  show('video');
  show('canvas', false);
  show('hint', false);
  $('camera').ariaPressed = 'true';
  $('camera').textContent = 'Stop the camera';
  const frame = async () => {
    if (!stream) return;
    await classify(video);
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

function stopCamera() {
  stream?.getTracks().forEach(track => track.stop());
  stream = undefined;
  show('video', false);
  show('canvas', !!source);
  show('hint', !source);
  $('camera').ariaPressed = 'false';
  $('camera').textContent = 'Use the camera';
}

// other models

function random({dtype, sizes}) {
  const count = sizes.reduce((a, b) => a * b, 1);
  const types = {float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
    int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array,
    uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array};
  const small = () => Math.floor(Math.random() * (dtype === 'bool' ? 2 : 10));
  const value = dtype === 'float16' ? () => 0x3800 + small() : dtype.startsWith('float')
    ? () => Math.random() * 2 - 1 : dtype.endsWith('int64') ? () => BigInt(small()) : small;
  return {data: types[dtype].from({length: count}, value), shape: sizes};
}

const row = (name, text) => {
  const item = document.createElement('li'), code = document.createElement('code');
  code.textContent = text;
  item.append(name, code);
  return item;
};

async function runRandom() {
  $('random').disabled = true;
  try {
    const inputs = Object.fromEntries(settings.inputs.map(port => [port.name, random(port)]));
    const outputs = await timed(inputs);
    $('outputs').replaceChildren(...model.info.outputs.map(({name, dtype}) => {
      const {data, shape} = outputs[name];
      const first = Array.from(data.slice(0, 4), x => Number(Number(x).toPrecision(4)));
      return row(name, `${dtype} [${shape.join(', ')}] = ${first.join(', ')}${data.length > 4 ? ', …' : ''}`);
    }));
    show('results');
  } catch (error) {
    failed(error);
  } finally {
    $('random').disabled = false;
  }
}

// the page

document.title = $('name').textContent = settings.name;
$('inputs').replaceChildren(...settings.inputs.map(({name, dtype, shape}) => row(name, `${dtype} ${shape}`)));
$('file').addEventListener('change', event => take(event.target.files[0]));
$('camera').addEventListener('click', camera);
$('random').addEventListener('click', runRandom);
$('again').addEventListener('click', start);
for (const type of ['dragover', 'dragleave', 'drop']) {
  document.addEventListener(type, event => {
    event.preventDefault();
    $('drop').classList.toggle('over', type === 'dragover');
    if (type === 'drop') take(event.dataTransfer.files[0]);
  });
}
document.addEventListener('paste', event => take(event.clipboardData.files[0]));
await start();
