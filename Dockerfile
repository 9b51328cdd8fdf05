# slimelite with SGLang on NVIDIA GPUs:   docker build -t slimelite --build-arg UID="$(id -u)" .
#   mkdir -p data runs
#   docker run --gpus all --ipc=host --network=host -v "$PWD/data:/slimelite/data" -v "$PWD/runs:/slimelite/runs" -it slimelite
# Programs run as the user slimelite with the id of --build-arg UID, so that mounted folders keep your owner.
# Not built: the machine that it was written on has no Docker engine. tests/test_containers.py checks its form.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG UID=1000
# Ubuntu's images have a user with the id 1000; Kubernetes wants the user as a number (runAsNonRoot)
RUN (userdel --remove ubuntu || true) && useradd --uid "$UID" --create-home slimelite && install -d -o slimelite /slimelite /venv
USER $UID
WORKDIR /slimelite
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
COPY --chown=$UID . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[sglang]' && mkdir -p data runs
CMD ["bash"]
