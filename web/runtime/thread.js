/** One more thread of a model on WebAssembly: takes pieces of every run until it is stopped. */

const node = globalThis.process?.getBuiltinModule?.('node:worker_threads')?.parentPort;

function start({module, memory, threads, stack}) {
  const {exports} = new WebAssembly.Instance(module, {env: {memory}});
  exports.stack_pointer.value = stack;
  (node ?? self).postMessage('ready');
  exports.work(threads);
}

if (node) node.once('message', start);
else self.onmessage = event => start(event.data);
