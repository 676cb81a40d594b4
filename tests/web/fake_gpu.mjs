/**
 * A GPU device that computes nothing, counts what is made on it, and holds its caller to the rules
 * that a real one has: usages, ranges, alignments, mapping.
 */

const check = (ok, message) => { if (!ok) throw new Error(`against WebGPU's rules: ${message}`); };

export function fakeDevice({features = [], limits = {}} = {}) {
  const counts = {}, count = what => { counts[what] = (counts[what] ?? 0) + 1; };
  let lose;
  const lost = new Promise(resolve => { lose = resolve; });
  const inUse = buffer => {
    check(!buffer.destroyed, 'a destroyed buffer is used');
    check(buffer.mapState === 'unmapped', 'a mapped buffer is used');
  };
  const copyable = (n, what) => check(Number.isInteger(n) && n % 4 === 0, `${what} is ${n}`);

  const device = {
    counts, lost, destroyed: false, features: new Set(features),
    limits: {maxBufferSize: 2 ** 28, maxStorageBufferBindingSize: 2 ** 27,
      maxStorageBuffersPerShaderStage: 8, maxComputeWorkgroupSizeX: 256,
      maxComputeInvocationsPerWorkgroup: 256, ...limits},
    destroy() { device.destroyed = true; lose({reason: 'destroyed', message: 'it was destroyed'}); },
    lose: message => lose({reason: 'unknown', message}),
    pushErrorScope() {},
    popErrorScope: async () => null,
    createBuffer({size, usage}) {
      count('buffer');
      copyable(size, 'a size');
      check(size <= device.limits.maxBufferSize, 'a buffer is too large');
      const data = new ArrayBuffer(size);
      const buffer = {
        size, usage, mapState: 'unmapped', destroyed: false, data,
        async mapAsync(mode, offset, length) {
          check(buffer.mapState === 'unmapped', 'a mapped buffer is mapped');
          check(usage & 1, 'a buffer without MAP_READ is mapped');
          copyable(length, 'a mapped size');
          buffer.mapState = 'pending';
          await Promise.race([new Promise(resolve => setTimeout(resolve, 1)),
            lost.then(() => { throw new Error('lost'); })]);
          buffer.mapState = 'mapped';
        },
        getMappedRange(offset, length) {
          check(buffer.mapState === 'mapped', 'an unmapped buffer is read');
          return data.slice(offset, offset + length);
        },
        unmap() { buffer.mapState = 'unmapped'; },
        destroy() { buffer.destroyed = true; },
      };
      return buffer;
    },
    createShaderModule({code}) { count('module'); return {code}; },
    createBindGroupLayout({entries}) { count('bind group layout'); return {entries}; },
    createPipelineLayout(layout) { count('pipeline layout'); return layout; },
    async createComputePipelineAsync(pipeline) { count('pipeline'); return pipeline; },
    createBindGroup({layout, entries}) {
      count('bind group');
      check(layout.entries.length === entries.length, 'a bind group has other bindings');
      const written = new Set(), read = new Set();
      entries.forEach(({binding, resource: {buffer, offset = 0, size = buffer.size - offset}}, i) => {
        check(binding === i, 'bindings are out of order');
        check(offset % 256 === 0, `a binding begins at ${offset}`);
        check(size > 0 && offset + size <= buffer.size, 'a binding leaves its buffer');
        const {type} = layout.entries[i].buffer;
        check(buffer.usage & (type === 'uniform' ? 0x40 : 0x80), 'a buffer lacks a usage');
        check(size <= device.limits.maxStorageBufferBindingSize, 'a binding is too large');
        (type === 'storage' ? written : read).add(buffer);
      });
      check(![...read].some(b => written.has(b)), 'a buffer is read and written in one dispatch');
      return {entries, buffers: [...written, ...read]};
    },
    createCommandEncoder() {
      count('command encoder');
      let open = false;
      const used = [];
      return {
        beginComputePass() {
          count('pass');
          check(!open, 'a pass is open');
          open = true;
          return {
            setPipeline() {},
            setBindGroup(_, group) { used.push(...group.buffers); },
            dispatchWorkgroups(x, y = 1) {
              count('dispatch');
              check(x > 0 && x < 65536 && y > 0 && y < 65536, `a grid is ${x} x ${y}`);
            },
            end() { open = false; },
          };
        },
        copyBufferToBuffer(from, fromAt, to, toAt, size) {
          check(!open, 'a copy is inside of a pass');
          check(from !== to, 'a buffer is copied to itself');
          check(from.usage & 4 && to.usage & 8, 'a copy lacks a usage');
          [fromAt, toAt, size].forEach(n => copyable(n, 'a part of a copy'));
          check(fromAt + size <= from.size && toAt + size <= to.size, 'a copy leaves its buffer');
          used.push(from, to);
        },
        clearBuffer(buffer) { check(!open && buffer.usage & 8, 'a buffer is not cleared so'); },
        finish() { check(!open, 'a pass is not ended'); return used; },
      };
    },
    queue: {
      submit(lists) { count('submit'); lists.flat().forEach(inUse); },
      writeBuffer(buffer, offset, data) {
        inUse(buffer);
        check(buffer.usage & 8, 'a buffer is not written so');
        copyable(offset, 'an offset');
        copyable(data.byteLength, 'a size');
        check(offset + data.byteLength <= buffer.size, 'a write leaves its buffer');
        new Uint8Array(buffer.data).set(
          new Uint8Array(data.buffer, data.byteOffset, data.byteLength), offset);
      },
    },
  };
  return device;
}
