"""Bundles: plans as a web page's module, written into a folder that needs nothing else.

The end of the pipeline for web targets: reads Plans, writes JavaScript, weights, types and a page.

- `bundle`: the export, from a model or its plans to the folder
- `weights`: what is stored of constants, and in how many bits
- `vector`: the test vector that travels with a bundle
- `script`: JavaScript and WGSL without what only readers need
- `types`: index.d.ts
- runtime/, demo/: the JavaScript, HTML and CSS that are copied in
"""

from __future__ import annotations

from .bundle import TARGETS, Report, export

__all__ = ["TARGETS", "Report", "export"]
