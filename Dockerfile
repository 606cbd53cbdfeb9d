# The training job image. `make image` builds it; image/build.sh says with which arguments.
#
#   BASE_IMAGE    a Debian image with Python 3.11 or newer and pip; the final stage has the same one
#   ACCELERATOR   cpu: torch from local wheels, else from PyTorch's CPU index; cuda: from PyPI, with its libraries
#   WHEELS        an image of wheels to look into first (or --build-context wheels=FOLDER)
#   secret ca     a bundle of certificates, for who builds behind a proxy that needs one
#
# torch, the other packages and Ratchet itself are installed side by side into the same virtual
# environment, each in a stage of its own, and laid over one another: every layer holds what its stage
# alone adds, and a change of the code moves kilobytes. Their files have one date and their bytecode no
# dates, so the same commit and the same wheels make the same layers. The layers of tini and of the
# clean-up come from the base's packages of the day.
#
# No `syntax` line: it would need a registry.

ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG WHEELS=scratch

FROM ${WHEELS} AS wheels


FROM ${BASE_IMAGE} AS builder
WORKDIR /src
COPY image/setup_env.py image/install.py image/


FROM builder AS torch
ARG ACCELERATOR=cpu
COPY image/requirements-torch.lock image/requirements-cuda.lock image/
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=secret,id=ca \
    python3 -m image.install torch "${ACCELERATOR}"


FROM builder AS packages
COPY image/requirements.lock image/
RUN --mount=type=secret,id=ca python3 -m image.install packages


FROM builder AS ratchet
COPY pyproject.toml README.md LICENSE ./
COPY trainer/ trainer/
# setuptools, which builds the package, is one of the packages.
RUN --mount=type=bind,from=packages,source=/image/opt/ratchet,target=/packages \
    python3 -m image.install ratchet


FROM ${BASE_IMAGE} AS tini
# One small program of the base's own release; a pinned version would be gone with its next update.
# hadolint ignore=DL3008
RUN command -v tini || { apt-get update && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*; }
RUN install -D "$(command -v tini)" /image/usr/bin/tini


FROM ${BASE_IMAGE}
# Nobody installs anything in a running pod: no pip, neither the base's own nor Debian's.
RUN if dpkg-query --show python3-pip >/dev/null 2>&1; \
    then apt-get purge --yes --auto-remove python3-pip python3-venv; fi \
    && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/* \
        /var/log/apt /var/log/dpkg.log /var/cache/debconf/*-old /var/lib/dpkg/*-old \
    && install -d -m 775 /work
COPY --from=tini /image /
COPY --from=torch /image /
COPY --from=packages /image /
COPY --from=ratchet /image /

# HOME is the one folder that can be written with any user id and a read-only root file system. A user id
# without a name (OpenShift) needs USER, for Python's getpass and with it torch's compile cache.
ENV PATH=/opt/ratchet/bin:${PATH} \
    HOME=/tmp \
    USER=ratchet \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# A number, so that runAsNonRoot can see that it isn't root; group 0 may write /work.
USER 10001:0
WORKDIR /work

ENTRYPOINT ["/usr/bin/tini", "--", "ratchet"]
CMD ["run"]

# Last, for they change with every commit.
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="Ratchet" \
      org.opencontainers.image.description="Elastic DistributedDataParallel training whose progress only moves forward" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
