# CPU:       docker build -t maxtext .
# GPU:       docker build -t maxtext --build-arg EXTRA=cuda .       (run with --gpus all)
# TPU:       docker build -t maxtext --build-arg EXTRA=tpu .        (run with --privileged --net=host on a TPU VM)
# Pathways:  docker build -t maxtext --build-arg EXTRA=pathways .   (the pod that drives the slices; it has no TPU)
# Run:       docker run --rm -v "$PWD/runs:/app/runs" maxtext train configs/quickstart.yml
FROM python:3.12-slim

ARG EXTRA=""

WORKDIR /app

# Dependencies first, so that a change of the code does not install them again.
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
# An accelerator adds its plugin to exactly the JAX that the lock pins.
# hadolint ignore=DL3013
RUN version="$(python -c 'from importlib.metadata import version; print(version("jax"))')"; \
    case "$EXTRA" in \
      "") ;; \
      cuda) set -- "jax[cuda13]==$version" ;; \
      tpu) set -- "jax[tpu]==$version" ;; \
      pathways) set -- "jax==$version" "pathwaysutils==0.1.13" ;; \
      *) echo "EXTRA must be empty, cuda, tpu or pathways, not '$EXTRA'" >&2; exit 1 ;; \
    esac; \
    if [ "$#" -gt 0 ]; then pip install --no-cache-dir "$@"; fi

COPY pyproject.toml README.md LICENSE train.py ./
COPY configs configs
COPY scripts scripts
COPY maxtext maxtext
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && useradd --create-home --uid 1000 maxtext \
    && mkdir -p runs data \
    && chown maxtext runs data

# By its number, which Kubernetes can check against runAsNonRoot.
USER 1000
ENTRYPOINT ["maxtext"]
CMD ["--help"]
