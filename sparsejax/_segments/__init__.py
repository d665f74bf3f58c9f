"""SegmentTensor, conversions between representations of segments, and reductions."""

from sparsejax._segments.segment_tensor import SegmentTensor as SegmentTensor
