# SPDX-License-Identifier: Apache-2.0
# Any static test binary (WEFT_VM_EXTRA): runs as root in this kernel, must end with 0.
. /lib.sh

check "extra" /extra/run --test-threads 1
