# hf_vit for a CPU or for CUDA.
#
#     docker build --tag hf_vit .                                        # CUDA: torch as the package index has it
#     docker build --tag hf_vit --build-arg TORCH_INDEX=ADDRESS .        # CPU: the index of torch's CPU builds
#     docker run --rm --volume "$PWD:/work" hf_vit predict model photo.jpg
#     docker run --rm --gpus all --volume "$PWD:/work" hf_vit predict model photo.jpg --device cuda
#
# pytorch.org, "Get started", has ADDRESS (choose Linux, Pip, CPU).
FROM python:3.11-slim
ARG TORCH_INDEX=""
ARG EXTRAS="training,analysis,demo,export,openvino"
WORKDIR /opt/hf_vit
COPY constraints.txt ./
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint constraints.txt torch
COPY pyproject.toml setup.py README.md LICENSE hf_vit_command.py ./
COPY hf_vit hf_vit
COPY training training
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"
RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
RUN hf-vit env
ENTRYPOINT ["hf-vit"]
