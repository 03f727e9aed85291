# Linux image: CPU by default, NVIDIA with --build-arg ACCEL=cuda12 or cuda13 (run with --gpus all).
#
#   docker build -t mlx-parallm .
#   docker run --rm -p 8000:8000 -v mlx-data:/data mlx-parallm serve --api-key secret
#
# With the key from a file, and a volume that stays: docker compose up (compose.yaml).
#
# One engine on each GPU (docs/scaling.md):
#
#   docker run --rm --gpus all -p 8000:8000 mlx-parallm serve --api-key secret --data-parallel-size auto

FROM python:3.12.11-slim-trixie

RUN useradd --create-home --uid 1000 parallm \
    && install --directory --owner=parallm /data

WORKDIR /app
ARG ACCEL=cpu

COPY requirements/ requirements/
RUN pip install --no-cache-dir -r "requirements/linux-${ACCEL}.txt" -r requirements/build.txt

COPY pyproject.toml README.md LICENSE ./
COPY mlx_parallm/ mlx_parallm/
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

USER 1000
WORKDIR /home/parallm

# Processes load OpenBLAS from this file; without it each would make one in /tmp.
RUN python -m mlx_parallm.process_setup.openblas

# What must outlive the container is below /data: files, batches and training sessions, models of the
# hub, compiled kernels, and the KV of earlier prompts.
ENV MLX_PARALLM_DATA_DIR=/data \
    HF_HOME=/data/huggingface \
    MLX_PARALLM_KERNEL_CACHE_DIR=/data/kernels \
    MLX_PARALLM_KV_DISK=/data/kv \
    MLX_PARALLM_HOST=0.0.0.0 \
    MLX_PARALLM_PORT=8000 \
    PYTHONUNBUFFERED=1

EXPOSE 8000
VOLUME /data

HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['MLX_PARALLM_PORT']}/health\", timeout=4)"]

ENTRYPOINT ["mlx_parallm"]
CMD ["serve"]
