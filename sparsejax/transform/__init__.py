"""The transformation: sparse gradients for functions that read tables by rows."""

from sparsejax.transform import rules as rules  # registers them
from sparsejax.transform.explain import explain as explain
from sparsejax.transform.grad import grad as grad, value_and_grad as value_and_grad
from sparsejax.transform.plan import DensifyError as DensifyError
