"""Every test sees 8 virtual CPU devices; both variables must stand before jax is imported, also for child processes."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
flag = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# Virtual devices share one thread pool: collectives that wait in it must leave room for what they wait for.
os.environ["PJRT_NPROC"] = "18"
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
# What is tested is arithmetic, not speed: without LLVM's optimisations a train step compiles in half the time.
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
