# CPU:  docker build -t maxtext .
# GPU:  docker build -t maxtext --build-arg EXTRA=cuda .     (run with --gpus all)
# TPU:  docker build -t maxtext --build-arg EXTRA=tpu .
# Run:  docker run --rm -v "$PWD/runs:/app/runs" maxtext train configs/quickstart.yml
FROM python:3.12-slim

ARG EXTRA=""

WORKDIR /app

# Dependencies first, so that a change of the code does not install them again.
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
# An accelerator adds its plugin to exactly the JAX that the lock pins.
RUN case "$EXTRA" in \
      "") ;; \
      cuda) extra=cuda13 ;; \
      tpu) extra=tpu ;; \
      *) echo "EXTRA must be empty, cuda or tpu, not '$EXTRA'" >&2; exit 1 ;; \
    esac; \
    if [ -n "$EXTRA" ]; then \
      version="$(python -c 'from importlib.metadata import version; print(version("jax"))')" \
      && pip install --no-cache-dir "jax[$extra]==$version"; \
    fi

COPY pyproject.toml README.md LICENSE train.py ./
COPY configs configs
COPY scripts scripts
COPY maxtext maxtext
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && useradd --create-home --uid 1000 maxtext \
    && mkdir -p runs data \
    && chown maxtext runs data

USER maxtext
ENTRYPOINT ["maxtext"]
CMD ["--help"]
