// SPDX-License-Identifier: Apache-2.0
//! A hash that names and ids in the kernel are made of: the same after every restart and in every release, which the hashers of
//! the standard library do not promise.

/// FNV-1a of 64 bits, then the finish of splitmix64, so that every bit of a name depends on the whole seed.
pub fn stable(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let fold = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let hash = bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, fold);
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_never_changes() {
        assert_eq!(super::stable(*b""), GOLDEN[0]);
        assert_eq!(super::stable(*b"/run/flannel/subnet.env"), GOLDEN[1]);
    }

    /// Tables, chains, nexthops and devices of running nodes hang on these.
    const GOLDEN: [u64; 2] = [0xf52a15e9a9b5e89b, 0xbc1e0b32ec2ebbb2];
}
