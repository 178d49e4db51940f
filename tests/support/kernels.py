"""The kernels of the bits that golden.json holds, set before torch is imported."""

# Those of AVX2 also where the processor has AVX-512, whose kernels give other bits
KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
