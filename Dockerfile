# slimelite with SGLang on NVIDIA GPUs:   docker build -t slimelite .
#   docker run --gpus all --ipc=host --network=host -v "$PWD/data:/slimelite/data" -it slimelite
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /slimelite
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[sglang]'
CMD ["bash"]
