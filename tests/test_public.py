"""The public names, pinned."""

import inspect

import sparsejax as sj


NAMES = {
    # types
    "SegmentTensor",
    "SelectedRows",
    "concatenate",
    # conversions
    "lengths_to_offsets",
    "lengths_to_ranges",
    "lengths_to_segment_ids",
    "offsets_to_lengths",
    "segment_ids_to_lengths",
    "segment_ids_to_ranges",
    # operations
    "dot",
    "embedding_bag",
    "lookup",
    "pack_segments",
    "partition",
    "scatter_assign",
    "scatter_weighted_sum",
    "segment_all",
    "segment_any",
    "segment_argmax",
    "segment_argmin",
    "segment_count",
    "segment_cumsum",
    "segment_log_softmax",
    "segment_logmeanexp",
    "segment_logsumexp",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_normalize",
    "segment_prod",
    "segment_softmax",
    "segment_sqrtn",
    "segment_std",
    "segment_sum",
    "segment_top_k",
    "segment_var",
    "unique",
    "unpack_segments",
    # transformations
    "DensifyError",
    "explain",
    "grad",
    "value_and_grad",
    # errors
    "NotPulledError",
    # packages
    "data",
    "desc",
    "extend",
    "nn",
    "optim",
    "parallel",
    "store",
    "viz",
}


def _public(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        # `import sparsejax` binds its sub-packages as well; `transform` is one whose
        # names are all at the top.
        and not (inspect.ismodule(value) and name in ("transform", "demo"))
    }


def test_names():
    assert _public(sj) == NAMES
    assert _public(sj.extend) - {"Any", "Callable"} == {
        "RuleContext",
        "TableRef",
        "register_flow",
        "register_rule",
    }
    optim = {n for n in _public(sj.optim) if not inspect.ismodule(getattr(sj.optim, n))}
    assert optim == {
        "accumulate",
        "adagrad",
        "dynamic_loss_scale",
        "exact",
        "exact_value_and_grad",
        "flush_weight_decay",
        "ftrl",
        "global_norm",
        "group_adagrad",
        "is_lazy_exact",
        "is_row_separable",
        "lazy",
        "partial_rowwise_lamb",
        "row_count_adam",
        "rounding",
        "rowwise_adagrad",
        "rowwise_adam",
        "weight_decay",
    }


def test_names_of_data():
    data = {n for n in _public(sj.data) if not inspect.ismodule(getattr(sj.data, n))}
    assert data == {
        "ArrayDataset",
        "DataLoader",
        "HashIds",
        "SimpleDataset",
        "Vocabulary",
        "iter_csv_ids",
        "read_csv_ids",
        "read_libsvm",
        "write_libsvm",
    }


def test_version():
    assert sj.__version__
