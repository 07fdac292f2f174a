# SPDX-License-Identifier: Apache-2.0
"""C source of a cuBLAS that computes nothing: a function for each name that is asked for, of those that standard input
mentions.

    nm -D --undefined-only libtorch_cuda.so | python cublas.py > cublas.c
"""

from __future__ import annotations

import re
import sys

HANDLE = "static int it; *handle = &it; return 0;"
ANSWERING = {
    "cublasCreate_v2": ("void **handle", HANDLE),
    "cublasLtMatmulDescCreate": ("void **handle, int a, int b", HANDLE),
    "cublasLtMatrixLayoutCreate": ("void **handle, int a, unsigned long b, unsigned long c, long d", HANDLE),
    "cublasLtMatmulPreferenceCreate": ("void **handle", HANDLE),
    "cublasLtMatmulAlgoGetHeuristic": (
        "void *a, void *b, void *c, void *d, void *e, void *f, void *g, int most, void *found, int *count",
        "if (most > 0) __builtin_memset(found, 0, 96); *count = 1; return 0;",
    ),
    "cublasGetPointerMode_v2": ("void *handle, int *mode", "*mode = 0; return 0;"),
    "cublasGetMathMode": ("void *handle, int *mode", "*mode = 0; return 0;"),
    "cublasLtGetVersion": ("", "return 130100;"),
}

for name in sorted(set(re.findall(r"\bcublas\w+", sys.stdin.read()))):
    parameters, body = ANSWERING.get(name, ("", "return 0;"))
    result = "unsigned long" if name == "cublasLtGetVersion" else "int"
    print(f"{result} {name}({parameters}) {{ {body} }}")
