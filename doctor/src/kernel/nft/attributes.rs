// SPDX-License-Identifier: Apache-2.0
//! The numbers of attributes, with the names that they have in linux/netfilter/nf_tables.h, without `NFTA_`. Those that the
//! agent writes, too, are in [`weft_netlink::nftables::attributes`].

/// Of the description of the keys of a set.
pub mod set {
    pub const DESC: u16 = 9;
    pub const DESC_CONCAT: u16 = 2;
    pub const FIELD_LEN: u16 = 1;
}

/// Of the elements of a set.
pub mod elements {
    pub const DATA: u16 = 2;
    pub const FLAGS: u16 = 3;
    pub const KEY_END: u16 = 10;
}

/// Of an instruction, which the kernel calls expression.
pub mod expr {
    pub const LIST_ELEM: u16 = 1;
    pub const NAME: u16 = 1;
    pub const DATA: u16 = 2;
    pub const VERDICT_CODE: u16 = 1;
    pub const VERDICT_CHAIN: u16 = 2;

    /// The register that `meta`, `ct`, `payload`, `immediate`, `exthdr`, `fib`, `numgen`, `rt`, `osf` and `xfrm` write.
    pub const DREG: u16 = 1;
    /// The register that `bitwise`, `byteorder`, `hash`, `socket` and `tunnel` write.
    pub const SECOND_DREG: u16 = 2;
    /// The register that `bitwise`, `byteorder`, `cmp` and `range` read.
    pub const SREG: u16 = 1;

    pub const META_KEY: u16 = 2;
    pub const CT_KEY: u16 = 2;
    pub const FIB_RESULT: u16 = 2;
    pub const FIB_FLAGS: u16 = 3;
    pub const PAYLOAD_BASE: u16 = 2;
    pub const PAYLOAD_OFFSET: u16 = 3;
    pub const PAYLOAD_LEN: u16 = 4;
    pub const IMMEDIATE_DATA: u16 = 2;
    pub const BITWISE_MASK: u16 = 4;
    pub const BITWISE_XOR: u16 = 5;
    pub const BITWISE_OP: u16 = 6;
    pub const BYTEORDER_LEN: u16 = 4;
    pub const BYTEORDER_SIZE: u16 = 5;
    pub const CMP_OP: u16 = 2;
    pub const CMP_DATA: u16 = 3;
    pub const RANGE_OP: u16 = 2;
    pub const RANGE_FROM_DATA: u16 = 3;
    pub const RANGE_TO_DATA: u16 = 4;
    pub const LOOKUP_SET: u16 = 1;
    pub const LOOKUP_SREG: u16 = 2;
    pub const LOOKUP_DREG: u16 = 3;
    pub const LOOKUP_FLAGS: u16 = 5;
    pub const DYNSET_EXPR: u16 = 7;
    pub const DYNSET_EXPRESSIONS: u16 = 10;
    pub const NAT_TYPE: u16 = 1;
    pub const NAT_REG_ADDR_MIN: u16 = 3;
    pub const NAT_REG_PROTO_MIN: u16 = 5;
    /// The type of the object of `objref`. If a map names the object, there is no such attribute.
    pub const OBJREF_IMM_TYPE: u16 = 1;
    /// The name of a match or a target of iptables.
    pub const XT_NAME: u16 = 1;
    /// The data of a target of iptables.
    pub const XT_INFO: u16 = 3;
    pub const QUEUE_NUM: u16 = 1;
    pub const QUEUE_TOTAL: u16 = 2;
    pub const QUEUE_FLAGS: u16 = 3;
}
