"""Segments of elements: SegmentTensor, its other forms, and reductions."""

from sparsejax._segments.segment_tensor import SegmentTensor as SegmentTensor
