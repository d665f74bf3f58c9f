"""segment_*: values and gradients against the recorded answers of Caffe2.

Recorded by running Caffe2 (torch 1.10.2, CPU): one case of each of its families, the
sorted, range, unsorted and lengths reductions. On purpose sparsejax differs in the
maximum of no elements, in gradients of ties and of `-inf`, and in which ids it takes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from reductions import ours


pytestmark = pytest.mark.slow


# operator/case -> (reduction, inputs, output, its gradient, gradients of the inputs).
RECORDED = {
    "SortedSegmentMean/1d": (
        "mean",
        {
            "data": [
                -1.7322458,
                0.072858796,
                -1.1050106,
                -1.9254678,
                -1.337489,
                -1.7052445,
                -1.5737624,
                -1.5153081,
                -0.66861486,
            ],
            "segment_ids": [0, 0, 1, 1, 1, 2, 2, 3, 3],
        },
        [-0.8296935, -1.4559892, -1.6395035, -1.0919615],
        [0.76455563, 0.18949346, -0.124145254, -0.89775306],
        {
            "data": [
                0.38227782,
                0.38227782,
                0.06316449,
                0.06316449,
                0.06316449,
                -0.062072627,
                -0.062072627,
                -0.44887653,
                -0.44887653,
            ]
        },
    ),
    "SortedSegmentRangeLogMeanExp/all_own": (
        "logmeanexp",
        {
            "data": [
                [0.7989382, 0.078345336],
                [-0.49445242, 0.9466838],
                [0.019906621, -1.1785377],
                [-0.7978173, -0.031450316],
            ],
            "segment_ids": [0, 1, 2, 3],
        },
        [
            [0.7989382, 0.078345336],
            [-0.49445242, 0.9466838],
            [0.019906621, -1.1785377],
            [-0.7978173, -0.031450316],
        ],
        [
            [-0.10148283, 0.63903344],
            [-0.62679726, -0.80291873],
            [0.25332665, -0.45223027],
            [0.98347515, -0.98078847],
        ],
        {
            "data": [
                [-0.10148283, 0.63903344],
                [-0.62679726, -0.80291873],
                [0.25332665, -0.45223027],
                [0.98347515, -0.98078847],
            ]
        },
    ),
    "UnsortedSegmentWeightedSum/gaps": (
        "sum",
        {
            "data": [
                [-1.7801255, 0.2299483],
                [-1.4962118, -1.304366],
                [1.7557802, 0.72207266],
                [-0.07137369, -1.8258814],
                [-1.4394966, 1.6010736],
            ],
            "scalars": [0.76558644, 0.10845594, 0.2959437, 0.8438503, 0.13516425],
            "segment_ids": [6, 0, 6, 3, 0],
        },
        [
            [-0.3568415, 0.074941665],
            [0.0, 0.0],
            [0.0, 0.0],
            [-0.060228713, -1.5407705],
            [0.0, 0.0],
            [0.0, 0.0],
            [-0.8432278, 0.38973814],
        ],
        [
            [0.38805136, -0.75720865],
            [0.030911556, -0.4767208],
            [-0.57134223, -0.2085053],
            [0.69989175, -0.7759776],
            [-0.4712403, 0.94110304],
            [-0.048278164, 0.0634852],
            [-0.48526382, 0.5401116],
        ],
        {
            "data": [
                [-0.3715114, 0.41350213],
                [0.042086475, -0.08212378],
                [-0.14361078, 0.15984263],
                [0.5906039, -0.65480894],
                [0.052450668, -0.10234754],
            ]
        },
    ),
    "LengthsMax/negative": (
        "max",
        {
            "data": [
                [-1.2484314, -2.3069062],
                [-1.4814448, -2.6555567],
                [-1.9059654, -1.0021232],
                [-1.5781527, -1.4888372],
            ],
            "lengths": [2, 0, 2],
        },
        [[-1.2484314, -2.3069062], [0.0, 0.0], [-1.5781527, -1.0021232]],
        [[0.18759705, 0.7118746], [0.070118725, -0.28806022], [0.93363225, 0.2659335]],
        {
            "data": [
                [0.18759705, 0.7118746],
                [0.0, 0.0],
                [0.0, 0.2659335],
                [0.93363225, 0.0],
            ]
        },
    ),
    "LengthsWeightedSum/lead_trail_empty_grad_on_weights": (
        "sum",
        {
            "data": [
                [1.0081159, -0.93260014],
                [-1.6033334, 0.16701654],
                [1.0134801, -0.15870239],
                [0.23997904, -0.5718468],
                [-0.50591147, -1.850593],
            ],
            "scalars": [-0.74897265, -1.4883574, 1.2262248, 1.1738158, 0.55418354],
            "lengths": [0, 0, 3, 0, 2, 0],
        },
        [
            [0.0, 0.0],
            [0.0, 0.0],
            [2.874036, 0.2553069],
            [0.0, 0.0],
            [0.0013233721, -1.696811],
            [0.0, 0.0],
        ],
        [
            [0.7030014, -0.68735135],
            [-0.87097293, -0.9940623],
            [-0.86017984, 0.82727414],
            [0.7891992, 0.6027395],
            [-0.66419196, 0.86594665],
            [0.4267792, 0.8037621],
        ],
        {
            "data": [
                [0.64425117, -0.6196057],
                [1.2802551, -1.2312796],
                [-1.0547738, 1.0144241],
                [-0.77963907, 1.0164618],
                [-0.36808425, 0.4798934],
            ],
            "scalars": [-1.6386769, 1.5173235, -1.0030656, -0.65458095, -1.2664924],
        },
    ),
}


def floats(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("name", RECORDED)
def test_values_and_gradients_are_those_recorded(name):
    reduction, inputs, output, cotangent, gradients = RECORDED[name]
    ids, lengths = inputs.get("segment_ids"), inputs.get("lengths")
    options = {}
    if name.startswith("LengthsMax"):
        options["empty"] = 0.0  # left out, it is -inf, the identity; Caffe2 gives 0

    def f(data, weights=None):
        given = {} if weights is None else {"weights": weights}
        if lengths is not None:
            data = sj.SegmentTensor.from_lengths(data, np.array(lengths))
            return ours(reduction)(data, **given, **options)
        return ours(reduction)(data, np.array(ids), **given, **options)

    args = [floats(inputs[key]) for key in ("data", "scalars") if key in inputs]
    out, pullback = jax.vjp(f, *args)
    np.testing.assert_allclose(out, floats(output), rtol=1e-6, atol=1e-6)
    # Caffe2 gives a gradient of the weights only on request; ours is always there.
    for key, actual in zip(("data", "scalars"), pullback(floats(cotangent))):
        if key in gradients:
            np.testing.assert_allclose(
                actual, floats(gradients[key]), rtol=1e-5, atol=1e-6
            )


def test_the_largest_of_each_segment_as_recorded():
    data = floats([1.4906731, 0.6322526, -1.2392435, -0.8639821, 1.199739])
    take = lambda x: sj.segment_top_k(
        sj.SegmentTensor.from_lengths(x, np.array([2, 3])), k=1
    )
    values, pullback, positions = jax.vjp(take, data, has_aux=True)
    np.testing.assert_array_equal(values, floats([[1.4906731], [1.199739]]))
    assert positions.tolist() == [[0], [2]]
    gradient = pullback(floats([[0.7280527], [0.5585451]]))[0]
    np.testing.assert_array_equal(
        gradient, floats([0.7280527, 0.0, 0.0, 0.0, 0.5585451])
    )
