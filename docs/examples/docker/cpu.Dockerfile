# slimelite without a GPU:   docker build -t slimelite-cpu -f docs/examples/docker/cpu.Dockerfile .
#   docker run -it slimelite-cpu bash scripts/quickstart.sh
# Written, not built: the machine that it was written on has no Docker engine.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /slimelite
COPY . .
RUN bash scripts/setup.sh && rm -rf /root/.cache
ENV PATH=/slimelite/.venv/bin:$PATH
CMD ["bash"]
