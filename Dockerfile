# A server of the demo model, or of a folder: docker run -v FOLDER:/model IMAGE serve /model --host 0.0.0.0
# For CPUs; with --build-arg DEVICE=cuda for NVIDIA GPUs, whose driver is the host's.
ARG DEVICE=cpu

FROM python:3.12-slim AS cpu
COPY constraints/python3.12.txt /constraints.txt
# The pin is met by 2.x+cpu, which pip prefers to PyPI's build for CUDA.
RUN pip install --no-cache-dir -c /constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch
ENV EXTRAS=serve,kv-events

FROM python:3.12-slim AS cuda
COPY constraints/python3.12.txt /constraints.txt
# Triton compiles the launchers of its kernels when they first run.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c /constraints.txt torch
ENV EXTRAS=serve,kv-events,gpu

FROM ${DEVICE}
COPY . /source
RUN pip install --no-cache-dir -c /constraints.txt "/source[$EXTRAS]" && rm -r /source
COPY docker/health.py /health.py
RUN useradd --create-home server
USER server
WORKDIR /home/server
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "/health.py"]
ENTRYPOINT ["megatron-hybrid"]
# In the container 127.0.0.1 is seen by nobody else.
CMD ["serve", "--host", "0.0.0.0"]
