"""What differs between versions of Pallas Mosaic GPU, and whether its kernels can run at all."""

import jax

MINIMUM_JAX = (0, 11)


def kernel_unavailable() -> str | None:
    """Why the kernel for Hopper cannot run here; None if it can, on a GPU or interpreted."""
    if not interpreted():
        backend = jax.default_backend()
        if backend != "gpu":
            return f"it needs a GPU, the backend is {backend!r}"
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", "unknown")
        if capability != "9.0":
            return (
                "it needs a Hopper GPU, of compute capability 9.0, "
                f"this is {device.device_kind!r} of compute capability {capability}"
            )
    if jax.__version_info__[:2] < MINIMUM_JAX:
        needed = ".".join(map(str, MINIMUM_JAX))
        return f"it needs jax >= {needed}, this is {jax.__version__}"
    return None


def interpreted() -> bool:
    """Whether kernels traced now run in Pallas's interpreter for GPU kernels, on CPU.

    jax.jit keys its cache by this setting, but it has no public reader.
    """
    from jax._src import config

    return config.pallas_tpu_interpret_mode_context_manager.value is not None
