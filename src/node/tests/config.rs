// SPDX-License-Identifier: Apache-2.0
//! Another net-conf while the agent runs.

use weft_subnet::source::Event;

use super::{CONFIG, TestNode, local};
use crate::options::OnLostLease;

#[tokio::test]
async fn net_conf_keys_that_need_a_restart_are_named() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let rows = [
            (r#"{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}"#, "Network"),
            (r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#, "Backend.Type"),
            (
                r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48","EnableNFTables":true,
                    "SubnetMax":"10.5.9.0","Backend":{"Type":"host-gw"}}"#,
                "EnableIPv6, EnableNFTables",
            ),
        ];
        for (text, keys) in rows {
            test.node.store_changed(vec![Event::Config(text.to_owned())]).await;
            let wanted = format!("net-conf: restart the agent to apply the change of {keys}");
            assert_eq!(test.node.net_conf.not_applied, Some(wanted), "{text}");
        }
        // The problem ends when the change is taken back. A change of another key needs no restart.
        test.node.store_changed(vec![Event::Config(CONFIG.to_owned())]).await;
        assert_eq!(test.node.net_conf.not_applied, None);
        let text = r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0","Backend":{"Type":"host-gw"}}"#;
        test.node.store_changed(vec![Event::Config(text.to_owned())]).await;
        assert_eq!((&test.node.net_conf.not_applied, test.node.net_conf.text.as_str()), (&None, text));
    })
    .await;
}
