// SPDX-License-Identifier: Apache-2.0
//! A hash for names and IDs of kernel objects. It is the same after every restart and in every release. The hashers of
//! the standard library do not promise that.

/// Hashes bytes with 64-bit FNV-1a, followed by the finaliser of splitmix64. With the finaliser, every bit of the hash
/// depends on the whole input.
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
    fn the_hash_of_a_given_input_never_changes() {
        assert_eq!(super::stable(*b""), GOLDEN[0]);
        assert_eq!(super::stable(*b"/run/flannel/subnet.env"), GOLDEN[1]);
    }

    /// Names and IDs of tables, chains, nexthops and devices on running nodes depend on these values.
    const GOLDEN: [u64; 2] = [0xf52a15e9a9b5e89b, 0xbc1e0b32ec2ebbb2];
}
