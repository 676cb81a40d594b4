/** The page's side of a model in a worker: the same methods, answered by worker.js. */

/** Loads the bundle in a worker that runs its worker.js; options are those of load(). */
export async function connect(worker, {onProgress, signal, ...options} = {}) {
  signal?.throwIfAborted();
  const waiting = new Map();
  let last = 0;
  const ask = (call, ...values) => new Promise((resolve, reject) => {
    waiting.set(++last, {resolve, reject});
    worker.postMessage({id: last, call, values});
  });
  worker.onmessage = ({data: {id, value, error, progress}}) => {
    if (progress) return onProgress?.(progress);
    const {resolve, reject} = waiting.get(id);
    waiting.delete(id);
    if (error) reject(Object.assign(new Error(error.message), error));
    else resolve(value);
  };
  worker.onerror = event => {
    for (const {reject} of waiting.values()) {
      reject(new Error(`the model's worker failed: ${event.message ?? 'worker.js is missing'}`));
    }
    waiting.clear();
  };
  const abort = () => ask('abort');
  signal?.addEventListener('abort', abort);
  try {
    const info = await ask('load', options);
    return {
      info,
      run: (inputs, settings) => ask('run', inputs, settings),
      warmup: () => ask('warmup'),
      reset: () => ask('reset'),
      selfTest: () => ask('selfTest'),
      dispose: () => ask('dispose').then(() => worker.terminate()),
    };
  } catch (error) {
    signal?.throwIfAborted();
    throw error;
  } finally {
    signal?.removeEventListener('abort', abort);
  }
}
