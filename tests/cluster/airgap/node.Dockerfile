# The last stage of the kind node image; node.sh makes its context.
FROM ratchet-airgap/node-root:bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY files/ /
COPY --chmod=755 bin/ /usr/local/bin/
COPY --chmod=755 kube/ /usr/bin/
COPY --chmod=755 runc /usr/local/sbin/runc
COPY version /kind/version
RUN set -eux; \
    chmod 755 /usr/local/bin/entrypoint /kind /kind/bin /kind/bin/*; \
    # as in kind's base image: only what a node needs starts \
    find /lib/systemd/system/sysinit.target.wants/ -name systemd-tmpfiles-setup.service -delete; \
    rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* \
        /lib/systemd/system/local-fs.target.wants/* /lib/systemd/system/basic.target.wants/* \
        /lib/systemd/system/sockets.target.wants/*udev* \
        /lib/systemd/system/sockets.target.wants/*initctl*; \
    echo ReadKMsg=no >> /etc/systemd/journald.conf; \
    ln -sf /usr/lib/systemd/systemd /sbin/init; \
    systemctl enable kubelet containerd undo-mount-hacks; \
    systemctl mask systemd-binfmt.service; \
    mkdir -p /etc/kubernetes/manifests /kind/manifests /opt/cni; \
    ln -s /usr/lib/cni /opt/cni/bin; \
    # the spec that every container of the node starts from \
    ctr oci spec \
        | jq '.hooks.createContainer += [{"path": "/kind/bin/mount-product-files.sh"}] | del(.process.rlimits)' \
        > /etc/containerd/cri-base.json; \
    # a container may not lower its oom_score_adj below the node's own \
    sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' /etc/containerd/config.toml; \
    # no volume provisioner: the tests use emptyDir only \
    printf '%s\n' 'apiVersion: storage.k8s.io/v1' 'kind: StorageClass' 'metadata:' '  name: none' \
        'provisioner: kubernetes.io/no-provisioner' > /kind/manifests/default-storage.yaml
COPY store/ /var/lib/containerd/
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
