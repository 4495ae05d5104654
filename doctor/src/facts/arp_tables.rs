// SPDX-License-Identifier: Apache-2.0
//! The rules of arptables-legacy.

use std::fs;

use crate::programs::{LIMIT, run};

/// Where the kernel lists the tables of arptables-legacy.
const LEGACY_TABLES: &str = "/proc/thread-self/net/arp_tables_names";

/// Reads the rules of arptables-legacy. Without its table or its program there are none.
pub(super) fn read() -> String {
    let tables = fs::read_to_string(LEGACY_TABLES).unwrap_or_default();
    if tables.trim().is_empty() {
        return String::new();
    }
    run("arptables-legacy-save", &[], LIMIT).unwrap_or_default()
}
