// SPDX-License-Identifier: Apache-2.0
//! Makes the server's side of etcd's protocol.

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure().build_client(false).compile_protos(&["proto/etcd.proto"], &["proto"])
}
