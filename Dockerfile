# docker build -t redraft .
# docker run --rm -p 127.0.0.1:8012:8012 -e REDRAFT_API_KEY=choose-one redraft
#
# torch comes as pip finds it, which on Linux brings CUDA along. For a smaller image without it:
#   docker build --build-arg PIP_ARGS="--index-url URL-OF-TORCH'S-CPU-WHEELS --extra-index-url URL-OF-ALL-OTHERS" -t redraft .
# For a Ray cluster (deploy/rayservice.yaml):
#   docker build --build-arg EXTRA=cluster -t redraft-cluster .
FROM python:3.12-slim

ARG PIP_ARGS=""
ARG EXTRA=server
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY redraft redraft
# Kernels for a GPU are built when first needed, for which Triton wants a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir $PIP_ARGS ".[$EXTRA]" \
    && useradd --create-home redraft
USER redraft
EXPOSE 8012

# Inside of a container it listens on all addresses, so it wants a key (REDRAFT_API_KEY).
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8012/health')"]
ENTRYPOINT ["redraft", "serve", "--host", "0.0.0.0", "--port", "8012"]
