// What a page's author writes; every expected error is one, or tsc says so.
import { load, TinyedgeError, type Inputs, type Model } from './hand/index.js';
import { load as loadOpen } from './open/index.js';
import { connect } from './hand/remote.js';

const model: Model = await load({
  onProgress: ({ loaded, total }) => console.log(loaded / total),
  signal: new AbortController().signal,
  cache: true,
});
const inputs: Inputs = { x: new Float32Array(196608) };
const { y } = await model.run(inputs);
const first: number = y.data[0]!;
const length: 196608 = y.shape[0];
console.log(first, length, model.info.device === 'webgpu');

// @ts-expect-error a wrong name
await model.run({ image: new Float32Array(196608) });
// @ts-expect-error a wrong name beside the right one
await model.run({ x: new Float32Array(196608), image: new Float32Array(1) });
// @ts-expect-error a name is missing
await model.run({});
// @ts-expect-error a wrong type of elements
await model.run({ x: new Float64Array(196608) });
// @ts-expect-error a wrong shape
await model.run({ x: { data: new Float32Array(6), shape: [2, 3] } });
// @ts-expect-error there is no such output
console.log((await model.run(inputs)).z);
// @ts-expect-error no such back end in this bundle
await load({ device: 'wasm' });

declare const buffer: GPUBuffer, device: GPUDevice;
await load({ device });
const left = await model.run({ x: buffer }, { outputs: 'gpu' });
console.log(left.y.data.size);
await model.run({ x: buffer }, { outputs: { y: buffer } });
// @ts-expect-error the data is on the GPU
console.log(left.y.data[0]);

const open = await loadOpen();
const rows: number = (await open.run({ x: { data: new Float32Array(6), shape: [3, 2] } })).y.shape[0];
// @ts-expect-error the shape of an open dimension has to be told
await open.run({ x: new Float32Array(6) });

const remote = await connect(new Worker(new URL('./hand/worker.js', import.meta.url)));
console.log(rows, (await remote.run(inputs)).y.data.length, (await remote.selfTest()).passed);

try {
  await model.warmup();
} catch (error) {
  if (error instanceof TinyedgeError && error.code === 'lost') await model.dispose();
}
