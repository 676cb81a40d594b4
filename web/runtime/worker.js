/** A model in a worker of its own: start this file as a module worker, and give it to connect(). */

import {load} from './index.js';

let model;
const loading = new AbortController();

const calls = {
  async load(options, port) {
    const onProgress = progress => port.postMessage({progress});
    model = await load({...options, onProgress, signal: loading.signal});
    return model.info;
  },
  abort: () => loading.abort(),
  run: (inputs, options) => model.run(inputs, options),
  warmup: () => model.warmup(),
  reset: () => model.reset(),
  selfTest: () => model.selfTest(),
  dispose: () => model.dispose(),
};

self.onmessage = async ({data: {id, call, values}}) => {
  try {
    const value = await calls[call](...values, self);
    const moved = call === 'run' ? Object.values(value).map(output => output.data.buffer) : [];
    self.postMessage({id, value}, moved);
  } catch ({name, message, code}) {
    self.postMessage({id, error: {name, message, code}});
  }
};
