"""Kernels in C++ with which sparsejax reads, sums, adds and finds rows on a CPU.

There is nothing to call: sparsejax finds this package and registers its handlers.
"""

from sparsejax_native._kernels import handlers as handlers


# Changes whenever the arguments of a handler do. sparsejax takes one only.
INTERFACE = 2
