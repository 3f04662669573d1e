# For NVIDIA GPUs. `docker build .` makes the image of the portable backend: any card from compute capability 8.0 on, no CUDA compiler.
# `docker build --target hopper .` has the Hopper kernels as well, compiled here for every published head size; it needs no GPU to build.
# The steps are those of deploy/install.sh, which CI runs without a container.

ARG CUDA=13.0.1
ARG UBUNTU=ubuntu24.04

FROM nvidia/cuda:${CUDA}-devel-${UBUNTU} AS hopper
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ ninja-build \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home engine
WORKDIR /src
COPY . .
# FlashInfer keeps what it compiles in a folder named after the architectures: without a GPU it must be told them, or nothing is found later.
# Its recipe names the compiler: with another one at run time, such as that of the wheels, all would be compiled again.
ENV FLASHINFER_WORKSPACE_BASE=/opt/engine/kernels FLASHINFER_CUDA_ARCH_LIST=9.0a HF_HOME=/cache TRITON_CACHE_DIR=/cache/triton \
    CUDA_HOME=/usr/local/cuda PATH=/opt/engine/bin:$PATH
RUN deploy/install.sh /opt/engine cuda
WORKDIR /home/engine
# The driver comes with the host; to load what was compiled, its stub is enough.
RUN mkdir /tmp/stubs && ln -s /usr/local/cuda/lib64/stubs/libcuda.so /tmp/stubs/libcuda.so.1 \
    && LD_LIBRARY_PATH=/tmp/stubs python -c "from models.kernels.hopper.compile import load_kernels as k; k(128, 72); k(128, 64)" \
    && rm -r /tmp/stubs && mkdir -p /cache && chown -R engine /cache /opt/engine/kernels
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "/opt/engine/deploy/healthcheck.py"]
ENTRYPOINT ["mini-vlm", "serve", "--host", "0.0.0.0"]

FROM nvidia/cuda:${CUDA}-runtime-${UBUNTU} AS portable
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Triton builds its launchers with a C compiler at their first use.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home engine && mkdir /cache && chown engine /cache
WORKDIR /src
COPY . .
RUN deploy/install.sh /opt/engine
ENV HF_HOME=/cache TRITON_CACHE_DIR=/cache/triton PATH=/opt/engine/bin:$PATH
WORKDIR /home/engine
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "/opt/engine/deploy/healthcheck.py"]
ENTRYPOINT ["mini-vlm", "serve", "--host", "0.0.0.0"]
