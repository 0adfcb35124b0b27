"""Every test sees 8 virtual CPU devices; both variables must stand before jax is imported, also for child processes."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
flag = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
