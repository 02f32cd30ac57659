#!/bin/sh
# Makes a local stand-in for python:3.12-slim where no container registry can be reached: this machine's Debian release by
# debootstrap, and a Python 3.12 of this machine copied to /usr/local, as in the official image.
# usage: stand_in_base.sh NAME PYTHON   (as root; needs buildah and debootstrap)
set -eu
name=$1
prefix=$("$2" -c 'import sys; assert sys.version_info[:2] == (3, 12), sys.version; print(sys.base_prefix)')
. /etc/os-release

container=$(buildah from scratch)
trap 'buildah rm "$container" > /dev/null' EXIT
root=$(buildah mount "$container")
debootstrap --variant=minbase \
  --include=ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libsqlite3-0,libssl3,libuuid1,zlib1g \
  "$VERSION_CODENAME" "$root" > /dev/null
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/*
# Whoever builds behind a CA of their own has it in this file.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"

tar -C "$prefix" --exclude='*/site-packages/*' --exclude=__pycache__ --exclude='*.a' --exclude=test --exclude=idlelib \
  -cf - bin lib/libpython3.12.so.1.0 lib/python3.12 | tar -C "$root/usr/local" -xf - --no-same-owner
chroot "$root" ldconfig
chroot "$root" python3.12 -m ensurepip > /dev/null
ln -sf pip3.12 "$root/usr/local/bin/pip"
ln -sf python3.12 "$root/usr/local/bin/python"

buildah config --cmd python3 "$container"
for variable in SSL_CERT_FILE PIP_CERT; do
  buildah config --env "$variable=/etc/ssl/certs/ca-certificates.crt" "$container"
done
buildah commit --quiet --format docker "$container" "$name"
