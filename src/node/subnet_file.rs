// SPDX-License-Identifier: Apache-2.0
//! subnet.env, which is written when the kernel can carry the packets of the pods that it lets start.

use weft_subnet::env::SubnetEnv;

use super::Node;
use crate::kernel::Kernel;
use crate::{files, subnet_file};

impl<K: Kernel> Node<K> {
    /// Writes subnet.env if its content is not what it should be. Nothing is written while the own device does not work, the
    /// command after the lease has not succeeded, or the wanted rules are not in place.
    pub fn write_subnet_file(&mut self) {
        if self.device_problem().or_else(|| self.extension_problem()).is_some() || self.kernel_problem.is_some() {
            return;
        }
        // Either this node or the container runtime masquerades, never both and never none.
        let Some(ipmasq) = self.ipmasq() else { return };
        let file = &self.context.options.subnet_file;
        // The MTU depends on the backends of the peers. Until they are known, a file of an earlier run knows it better.
        let has_our_subnet =
            |text: String| SubnetEnv::parse(&text).is_some_and(|env| env.subnets == self.plan.own().subnets);
        if !self.knows_peers() && files::read_text(file).is_ok_and(has_our_subnet) {
            return;
        }
        let text = SubnetEnv { ipmasq, ..self.plan.env() }.render();
        self.subnet_file_problem = match subnet_file::write(file, text.as_bytes()) {
            Ok(written) => {
                if written {
                    tracing::info!(file = %file.display(), mtu = self.plan.mtu(), "subnet.env written");
                }
                None
            }
            Err(error) => {
                let text = format!("write {}: {error}", file.display());
                tracing::error!("{text}");
                Some(text)
            }
        };
    }
}
