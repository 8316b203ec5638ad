# One target for each process: inference-hub, env-agents, engine (CPU), trainer, engine-gpu.
#
#   docker build --target env-agents -t headrace/env-agents .
#
# It needs no BuildKit feature, so the older builder works too; that one also builds the targets above the one asked for.
# VERSION and REVISION label the images.

# ---- Python on Debian, and the user that every process runs as.
FROM debian:bookworm-slim AS base
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 \
 && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* \
 && find /usr/lib/python3* -name __pycache__ -prune -exec rm -r {} + && rm -rf /usr/lib/python3.*/pydoc_data \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp headrace \
 && mkdir -p /app/runs && chown headrace:headrace /app/runs
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false
WORKDIR /app
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title=Headrace \
      org.opencontainers.image.description="Asynchronous reinforcement learning for tool-using LLM agents" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION

# ---- What installs packages, and is left behind.
FROM base AS build
RUN apt-get update && apt-get install -y --no-install-recommends binutils python3-venv \
 && python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/pip
COPY deploy/docker/install-small /usr/local/bin/

FROM build AS inference-hub-packages
COPY deploy/requirements/inference-hub.txt /tmp/requirements.txt
RUN install-small /tmp/requirements.txt

FROM build AS env-agents-packages
COPY deploy/requirements/env-agents.txt /tmp/requirements.txt
RUN install-small /tmp/requirements.txt

# ---- The two services: small, no torch.
FROM base AS inference-hub
COPY --from=inference-hub-packages /opt/venv /opt/venv
COPY shared shared
COPY services/inference_hub services/inference_hub
USER headrace
EXPOSE 8800
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8800/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "services.inference_hub", "--set", "inference_hub.host=0.0.0.0", "--set", "inference_hub.port=8800"]
CMD ["--config", "/etc/headrace/run.yaml"]

FROM base AS env-agents
COPY --from=env-agents-packages /opt/venv /opt/venv
COPY deploy/docker/headrace /usr/local/bin/
COPY shared shared
COPY services services
COPY examples examples
USER headrace
EXPOSE 8801
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8801/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "services.env_agents", "--set", "env_agents.host=0.0.0.0", "--set", "env_agents.port=8801"]
CMD ["--config", "/etc/headrace/run.yaml"]

# ---- PyTorch, which the CPU engine and the trainer share. The plain package is the CUDA build, which also runs on CPUs;
# PIP_EXTRA_INDEX_URL can name PyTorch's own index of CPU builds, which are gigabytes smaller.
FROM base AS torch
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv \
 && pip install --no-cache-dir torch==2.13.0
ENV HOME=/tmp OMP_NUM_THREADS=1

# ---- SGLang on a CPU, for laptops and tests.
FROM torch AS engine
COPY services/engine/requirements-cpu.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --no-deps sglang==0.5.23 \
 && echo torch==2.13.0 > /tmp/constraints.txt \
 && pip install --no-cache-dir -c /tmp/constraints.txt -r /tmp/requirements.txt pyyaml \
 && rm /tmp/*.txt
COPY shared shared
COPY services/engine services/engine
USER headrace
EXPOSE 30000
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:30000/model_info', timeout=4)"]
ENTRYPOINT ["python", "-m", "services.engine", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--config", "/etc/headrace/run.yaml"]

# ---- The DeepSpeed trainer. gcc builds DeepSpeed's and Triton's kernels when they are first used.
FROM torch AS trainer
COPY deploy/requirements/trainer.txt /tmp/requirements.txt
RUN echo torch==2.13.0 > /tmp/constraints.txt \
 && pip install --no-cache-dir -c /tmp/constraints.txt -r /tmp/requirements.txt \
 && rm /tmp/*.txt
COPY deploy/docker/headrace /usr/local/bin/
COPY shared shared
COPY services services
COPY examples examples
COPY trainer trainer
ENV PYTHONPATH=/app
USER headrace
ENTRYPOINT ["python", "-m", "trainer.launch"]
CMD ["--config", "/etc/headrace/run.yaml"]

# ---- SGLang's own image, of the version we test with, and how we start it.
FROM lmsysorg/sglang:v0.5.23 AS engine-gpu
WORKDIR /app
COPY shared shared
COPY services/engine services/engine
ENV HOME=/tmp PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 30000
HEALTHCHECK --interval=5s --timeout=5s --start-period=1800s \
  CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:30000/model_info', timeout=4)"]
ENTRYPOINT ["python3", "-m", "services.engine", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--config", "/etc/headrace/run.yaml"]
