/** A static server whose behaviour each test chooses by the first part of the path. */

import {createServer} from 'node:http';
import {readFile} from 'node:fs/promises';
import {extname, join, normalize} from 'node:path';
import {gzipSync} from 'node:zlib';

const TYPES = {'.js': 'text/javascript', '.mjs': 'text/javascript', '.html': 'text/html', '.css': 'text/css', '.json':
  'application/json', '.wasm': 'application/wasm', '.bin': 'application/octet-stream'};
const STRICT = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'";

/**
 * Serves root at /MODES/path, MODES joined by +: plain, csp (a strict policy), isolated (COOP and
 * COEP), gzip, chunked (no Content-Length), slow (weights in small pieces), damaged (one bit of the
 * weights), short (the weights' last byte is missing), kept (cached by the browser, not the weights).
 */
export async function serve(root) {
  const counts = {};
  const server = createServer(async (request, response) => {
    const [, modes, ...rest] = new URL(request.url, 'http://x').pathname.split('/');
    const path = normalize(rest.join('/'));
    if (modes === 'favicon.ico') return response.writeHead(204).end();
    const on = new Set(modes.split('+'));
    counts[path] = (counts[path] ?? 0) + 1;
    try {
      if (path.startsWith('..')) throw new Error('outside');
      let data = await readFile(join(root, path));
      const weights = extname(path) === '.bin';
      const headers = {'Content-Type': TYPES[extname(path)] ?? 'text/plain',
        'Cache-Control': on.has('kept') && !weights ? 'max-age=600' : 'no-store'};
      if (on.has('csp')) headers['Content-Security-Policy'] = STRICT;
      if (on.has('isolated')) {
        headers['Cross-Origin-Opener-Policy'] = 'same-origin';
        headers['Cross-Origin-Embedder-Policy'] = 'require-corp';
      }
      if (on.has('damaged') && weights) data[data.length >> 1] ^= 1;
      if (on.has('short') && weights) data = data.subarray(0, -1);
      if (on.has('gzip')) {
        data = gzipSync(data, {level: 1});
        headers['Content-Encoding'] = 'gzip';
      }
      if (!on.has('chunked')) headers['Content-Length'] = data.length;
      response.writeHead(200, headers);
      if (!(on.has('slow') && weights)) return response.end(data);
      for (let at = 0; at < data.length && !response.destroyed; at += 16384) {
        response.write(data.subarray(at, at + 16384));
        await new Promise(resolve => setTimeout(resolve, 10));
      }
      response.end();
    } catch {
      response.writeHead(404).end('not here');
    }
  });
  await new Promise(resolve => server.listen(0, '127.0.0.1', resolve));
  return {origin: `http://127.0.0.1:${server.address().port}`, counts,
    close: () => { server.closeAllConnections(); server.close(); }};
}
