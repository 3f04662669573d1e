# For NVIDIA GPUs. `docker build .` makes the image of the portable backend: any card from compute capability 8.0 on.
# `docker build --target hopper .` also has the Hopper kernels, compiled into the package for every published head size; the build needs no GPU.
# The steps are those of deploy/install.sh, which CI runs without a container. Dependencies have a layer of their own before the engine's
# wheel, so that a change of the sources neither installs nor pushes them again.

ARG CUDA=13.0.1
ARG UBUNTU=ubuntu24.04

FROM python:3.12-slim AS wheel
WORKDIR /src
COPY . .
RUN deploy/install.sh wheel /wheels

FROM nvidia/cuda:${CUDA}-devel-${UBUNTU} AS hopper
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ ninja-build \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home engine
RUN --mount=type=bind,source=pyproject.toml,target=/tmp/src/pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=/tmp/src/constraints.txt \
    --mount=type=bind,source=deploy/install.sh,target=/tmp/src/deploy/install.sh \
    /tmp/src/deploy/install.sh dependencies /opt/engine cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/tmp/wheels \
    --mount=type=bind,source=deploy/install.sh,target=/tmp/src/deploy/install.sh \
    /tmp/src/deploy/install.sh engine /opt/engine /tmp/wheels
# Kernels that are not in the package are compiled at run time, in /cache.
ENV FLASHINFER_WORKSPACE_BASE=/cache HF_HOME=/cache TRITON_CACHE_DIR=/cache/triton \
    HUMMING_CACHE_DIR=/cache/humming HUMMING_TMP_DIR=/cache/humming/tmp PATH=/opt/engine/bin:$PATH
WORKDIR /home/engine
RUN FLASHINFER_WORKSPACE_BASE=/tmp/kernels python -m models.kernels.hopper.build \
    && rm -r /tmp/kernels /root/.cache && mkdir -p /cache && chown engine /cache
COPY deploy/healthcheck.py deploy/drain.py /opt/engine/deploy/
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "/opt/engine/deploy/healthcheck.py"]
ENTRYPOINT ["mini-vlm", "serve", "--host", "0.0.0.0"]
ARG VERSION="" REVISION=""
LABEL org.opencontainers.image.title="mini-vlm" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="Serving engine for the Qwen3-VL family: Hopper kernels" \
    org.opencontainers.image.version="$VERSION" org.opencontainers.image.revision="$REVISION"

FROM nvidia/cuda:${CUDA}-runtime-${UBUNTU} AS portable
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Triton builds its launchers with a C compiler at their first use.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home engine && mkdir /cache && chown engine /cache
RUN --mount=type=bind,source=pyproject.toml,target=/tmp/src/pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=/tmp/src/constraints.txt \
    --mount=type=bind,source=deploy/install.sh,target=/tmp/src/deploy/install.sh \
    /tmp/src/deploy/install.sh dependencies /opt/engine cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/tmp/wheels \
    --mount=type=bind,source=deploy/install.sh,target=/tmp/src/deploy/install.sh \
    /tmp/src/deploy/install.sh engine /opt/engine /tmp/wheels
COPY deploy/healthcheck.py deploy/drain.py /opt/engine/deploy/
ENV HF_HOME=/cache TRITON_CACHE_DIR=/cache/triton HUMMING_CACHE_DIR=/cache/humming HUMMING_TMP_DIR=/cache/humming/tmp \
    PATH=/opt/engine/bin:$PATH
WORKDIR /home/engine
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "/opt/engine/deploy/healthcheck.py"]
ENTRYPOINT ["mini-vlm", "serve", "--host", "0.0.0.0"]
ARG VERSION="" REVISION=""
LABEL org.opencontainers.image.title="mini-vlm" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="Serving engine for the Qwen3-VL family: portable kernels" \
    org.opencontainers.image.version="$VERSION" org.opencontainers.image.revision="$REVISION"
