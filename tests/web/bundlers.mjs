/** A small application that uses a bundle, built by Vite and by webpack as they come. */

import {mkdir, writeFile} from 'node:fs/promises';
import {join} from 'node:path';

const MAIN = `
import {load} from './hand/index.js';
import {load as loadWasm} from './threaded/index.js';

try {
  const model = await load();
  const x = Float32Array.from({length: ${3 << 16}}, (_, i) => Math.sin(i));
  const {y} = await model.run({x});
  const threaded = await loadWasm({threads: 2});
  const other = await threaded.run({x});
  document.title = [y.data[5], other.y.data[5], threaded.info.threads].join(' ');
} catch (error) {
  document.title = error.message;
}
`;
const page = script => `<!doctype html><title>waiting</title>
<script type="module" src="${script}"></script>`;

/** Builds it below root: bundler -> folder of the page. */
export async function built(root) {
  await writeFile(join(root, 'main.js'), MAIN);
  await writeFile(join(root, 'index.html'), page('./main.js'));
  const vite = await import('vite');
  await vite.build({root, base: './', logLevel: 'error', configFile: false,
    build: {outDir: 'built-vite', target: 'es2022'}});

  const {default: webpack} = await import('webpack');
  const output = join(root, 'built-webpack');
  await mkdir(output, {recursive: true});
  await writeFile(join(output, 'index.html'), page('./main.js'));
  const stats = await new Promise((resolve, reject) => webpack({
    mode: 'production', context: root, entry: './main.js', output: {path: output},
  }, (error, result) => error ? reject(error) : resolve(result)));
  if (stats.hasErrors()) throw new Error(stats.toString({all: false, errors: true}));
  return {vite: 'built-vite', webpack: 'built-webpack'};
}
