"""Tests of peers that fail on purpose: by a pattern of their names, the reason."""

_AS_UNDER_JIT = (
    "The function is traced as under jit: jax.grad(jax.jit(fun)) fails alike, or "
    "behaves alike."
)
_OUR_WORDS = "The error has our words, which name sparsejax; its type is JAX's."
_FRAMES = "A traceback shows frames of ours, which JAX does not take for its own."

DIFFERENCES: dict[str, dict[str, str]] = {
    "jax": {
        # Python's control flow on values, tracers that are closed over.
        "CustomJVPTest::test_hard_stuff2": _AS_UNDER_JIT,
        "CustomJVPTest::test_python_control_flow": _AS_UNDER_JIT,
        "CustomVJP*Test::test_closure_convert_mixed_consts": _AS_UNDER_JIT,
        "CustomVJPTest::test_closure_with_vmap2": _AS_UNDER_JIT,
        "CustomVJP*Test::test_python_control_flow": _AS_UNDER_JIT,
        "CustomVJPTest::test_python_control_flow_bwd": _AS_UNDER_JIT,
        "APITest::test_grad_item": _AS_UNDER_JIT,
        "APITest::test_namedtuple_subclass_transparency": _AS_UNDER_JIT,
        "APITest::test_switch_value_jit": _AS_UNDER_JIT,
        # A primitive without an abstract evaluation cannot be traced at all.
        "APITest::test_unimplemented_interpreter_rules": _AS_UNDER_JIT,
        "APITest::test_bad_input": _OUR_WORDS,
        "APITest::test_grad_and_aux_error": _OUR_WORDS,
        "APITest::test_grad_bad_input": _OUR_WORDS,
        "APITest::test_grad_complex_result_errors": _OUR_WORDS,
        "APITest::test_grad_nonscalar_output": _OUR_WORDS,
        "APITest::test_grad_object_array_error": _OUR_WORDS,
        "APITest::test_grad_of_int_errors": _OUR_WORDS,
        "APITest::test_grad_tuple_output": _OUR_WORDS,
        "APITest::test_grad_unit_output": _OUR_WORDS,
        "APITest::test_grad_without_enough_args_error_message": _OUR_WORDS,
        "TracebackTest::test_custom_vjp_traceback": _FRAMES,
        "TracebackTest::test_grad_traceback": _FRAMES,
    },
    "optax": {},
}
