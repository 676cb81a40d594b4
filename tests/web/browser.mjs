/** Headless Chromium with WebGPU on a software adapter. */

import {chromium} from 'playwright-core';

export const launch = (args = []) => chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu-sandbox', '--enable-unsafe-webgpu',
    '--use-webgpu-adapter=swiftshader', '--disable-background-networking',
    '--disable-component-update', '--disable-sync', '--no-first-run', '--disable-dev-shm-usage',
    ...args],
});
