# Shoal in a container, as a user without rights.  docker build -t shoal .    docker run --init --rm shoal demo
#
# DEVICE: cpu, or the CUDA release that PyTorch is to be built for, such as cu130 (then: docker run --gpus all).
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG DEVICE=cpu
RUN useradd --create-home --uid 1000 shoal
COPY --from=wheel /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt \
        --extra-index-url "https://download.pytorch.org/whl/${DEVICE}" /wheels/*.whl
USER 1000
WORKDIR /home/shoal
RUN mkdir runs
# Runs, with their keys and checkpoints, outlive the container.
VOLUME /home/shoal/runs
ENTRYPOINT ["shoal"]
CMD ["--help"]
