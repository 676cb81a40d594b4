"""How a kernel's loops are split, ordered, vectorised and unrolled."""
