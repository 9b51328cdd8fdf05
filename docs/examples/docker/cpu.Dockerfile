# slimelite without a GPU:   docker build -t slimelite-cpu --build-arg UID="$(id -u)" -f docs/examples/docker/cpu.Dockerfile .
#   mkdir -p data runs
#   docker run -v "$PWD/data:/slimelite/data" -v "$PWD/runs:/slimelite/runs" -it slimelite-cpu bash scripts/quickstart.sh
# Programs run as the user slimelite with the id of --build-arg UID, so that mounted folders keep your owner.
# Not built: the machine that it was written on has no Docker engine. tests/test_containers.py checks its form.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
ARG UID=1000
RUN useradd --uid "$UID" --create-home slimelite && install -d -o slimelite /slimelite
USER $UID
WORKDIR /slimelite
COPY --chown=$UID . .
RUN bash scripts/setup.sh && rm -rf ~/.cache && mkdir -p data runs
ENV PATH=/slimelite/.venv/bin:$PATH
CMD ["bash"]
