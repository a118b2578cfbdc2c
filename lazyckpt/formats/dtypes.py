"""torch's dtypes by name, so that tools can describe a file without importing torch, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """Stands for a ``torch.dtype`` of any version of torch; ``itemsize`` in bytes."""

    name: str
    itemsize: int

    def __repr__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {
    name: Dtype(name, itemsize)
    for itemsize, names in (
        (1, "bool uint8 int8 quint8 qint8 quint4x2 quint2x4 bits8 bits1x8 bits2x4 bits4x2"),
        (1, "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2"),
        (1, "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7"),
        (2, "float16 bfloat16 int16 uint16 bits16"),
        (4, "float32 int32 uint32 complex32 bcomplex32 qint32"),
        (8, "float64 int64 uint64 complex64"),
        (16, "complex128"),
    )
    for name in names.split()
}
