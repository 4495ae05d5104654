// SPDX-License-Identifier: Apache-2.0
//! Publishes the CNI configuration as soon as pods can be reached.
//!
//! A container runtime calls the network of a node ready as soon as it finds a readable configuration. So its directory contains only a
//! symbolic link to a file beside subnet.env. The agent writes that file when pods can be reached. After a boot the directory of subnet.env
//! is empty, so the link leads nowhere, and the node is not ready before the agent is.
//!
//! Runtimes read their directory again when inotify reports a change in it. inotify does not report a change of the file behind a link. So
//! whenever the file is new, the link is replaced by a new one.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;
use weft_subnet::env::sibling_file;

use crate::files;
use crate::options::CniOptions;

/// Name of the configuration in both directories. It is flannel's name, so that the link replaces flannel's file. An agent whose subnet file
/// is not called `subnet.env` uses `10-flannel_NAME.conflist`. Runtimes use the first configuration in the order of names, which is this one.
pub const NAME: &str = "10-flannel.conflist";
/// Changes of the link or the file by other programs are repaired within this time.
const EVERY: Duration = Duration::from_secs(10);

/// Publishes the configuration. Without [`CniOptions`] it does nothing.
#[derive(Debug, Default)]
pub struct Conflist {
    options: Option<CniOptions>,
    subnet_file: PathBuf,
    next: Option<Instant>,
    /// This process made the link. A link of an earlier process may be older than the file, if that process died between the two.
    linked: bool,
    problem: Option<String>,
}

impl Conflist {
    /// Returns a value that has published nothing yet.
    pub fn new(options: Option<CniOptions>, subnet_file: &Path) -> Conflist {
        Conflist { options, subnet_file: subnet_file.to_owned(), ..Conflist::default() }
    }

    /// Returns the file whose contents are published, so that the caller can watch it.
    pub fn source(&self) -> Option<&Path> {
        self.options.as_ref().map(|options| options.conf.as_path())
    }

    /// Returns why the configuration, or its last edit, is not published.
    pub fn problem(&self) -> Option<String> {
        self.problem.clone()
    }

    /// Returns the time at which [`Conflist::keep`] checks again.
    pub fn next(&self) -> Option<Instant> {
        self.next.filter(|_| self.options.is_some())
    }

    /// Takes notice that the source changed: the next [`Conflist::keep`] checks at once.
    pub fn look_again(&mut self) {
        self.next = None;
    }

    /// Writes the file and the link if they are not as they should be. This must be called only while pods can be reached. It checks at most
    /// every ten seconds.
    pub fn keep(&mut self, now: Instant) {
        if self.options.is_none() || self.next.is_some_and(|next| now < next) {
            return;
        }
        // Without subnet.env the plugin would wait for it, and delay every pod.
        if !self.subnet_file.exists() {
            return;
        }
        self.next = Some(now + EVERY);
        let problem = self.publish().err().map(|error| error.to_string()).or_else(|| self.other_configurations());
        let problem = problem.map(|text| format!("CNI configuration: {text}"));
        if self.problem != problem
            && let Some(text) = &problem
        {
            tracing::error!("{text}");
        }
        self.problem = problem;
    }

    /// Describes configurations of other programs. CRI-O uses one of them after a boot, while our link leads nowhere, because it skips files
    /// that it cannot read. containerd reports an error then. Every runtime uses one that comes before ours in the order of names.
    fn other_configurations(&self) -> Option<String> {
        let dir = &self.options.as_ref()?.dir;
        let ours = link(dir, &self.subnet_file);
        let names = fs::read_dir(dir).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_one = |name: &String| {
            let kind = Path::new(name).extension().and_then(|kind| kind.to_str());
            Some(name.as_ref()) != ours.file_name() && matches!(kind, Some("conf" | "conflist" | "json"))
        };
        let mut others: Vec<String> = names.filter(is_one).collect();
        others.sort_unstable();
        let names = others.join(", ");
        (!others.is_empty()).then(|| {
            format!(
                "{} has {names} too: after a boot pods may start on that network; remove what is not in use",
                dir.display()
            )
        })
    }

    fn publish(&mut self) -> Result<(), PublishError> {
        let Some(CniOptions { conf, dir }) = &self.options else { return Ok(()) };
        let text = files::read(conf).map_err(|error| PublishError::Read { path: conf.clone(), error })?;
        check(&text).map_err(|error| PublishError::NotAList { path: conf.clone(), error })?;
        let (file, link) = (published(&self.subnet_file), link(dir, &self.subnet_file));
        let wrote = files::write(&file, &text).map_err(|error| PublishError::Write { path: file.clone(), error })?;
        if !wrote && self.linked && leads_to(&link, &file) {
            return Ok(());
        }
        place(&link, &file).map_err(|error| PublishError::Link { link: link.clone(), dir: dir.clone(), error })?;
        tracing::info!(link = %link.display(), file = %file.display(), "CNI configuration published");
        self.linked = true;
        Ok(())
    }
}

/// Where the manifests of weft and flannel mount the ConfigMap.
const MOUNTED: &str = "/etc/kube-flannel";

/// Returns what to do about a configuration that cannot be published.
fn remedy(conf: &Path) -> String {
    let what = if conf.starts_with(MOUNTED) {
        "cni-conf.json (ConfigMap kube-flannel-cfg)".to_owned()
    } else {
        conf.display().to_string()
    };
    format!("correct {what}; nothing new is published until then")
}

/// Why the configuration was not published.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error("read {}: {error}: {}", path.display(), remedy(path))]
    Read { path: PathBuf, error: io::Error },
    #[error("{} is not a list of CNI plugins: {error}: {}", path.display(), remedy(path))]
    NotAList { path: PathBuf, error: NotAList },
    #[error("write {}: {error}", path.display())]
    Write { path: PathBuf, error: io::Error },
    #[error("make the link {}: {error}{}", link.display(), files::remedy(error, dir))]
    Link { link: PathBuf, dir: PathBuf, error: io::Error },
}

/// Removes the link and the file that an agent with this subnet file makes. Returns true if there was such a link.
///
/// # Errors
/// The link or the file cannot be removed.
pub fn remove(dir: &Path, subnet_file: &Path) -> io::Result<bool> {
    let (file, link) = (published(subnet_file), link(dir, subnet_file));
    let ours = leads_to(&link, &file);
    if ours {
        fs::remove_file(&link)?;
    }
    files::remove(&file)?;
    Ok(ours)
}

/// Returns the path of the file. It is beside subnet.env, so a boot removes both. The path is absolute, because a link is not relative to the
/// working directory of the agent.
fn published(subnet_file: &Path) -> PathBuf {
    let file = sibling_file(subnet_file, NAME, |name| format!("10-flannel_{name}.conflist"));
    std::path::absolute(&file).unwrap_or(file)
}

/// Returns the path of the link in the directory of the runtime. It has the name of the file.
fn link(dir: &Path, subnet_file: &Path) -> PathBuf {
    dir.join(published(subnet_file).file_name().unwrap_or_default())
}

fn leads_to(link: &Path, file: &Path) -> bool {
    fs::read_link(link).is_ok_and(|to| to == file)
}

/// Replaces whatever file or link is there by a new link.
fn place(link: &Path, file: &Path) -> io::Result<()> {
    let dir = link.parent().unwrap_or(Path::new("/"));
    files::make_directory(link)?;
    let temporary = tempfile::Builder::new().prefix(".weft-").make_in(dir, |path| symlink(file, path))?;
    temporary.into_temp_path().persist(link).map_err(|failed| failed.error)?;
    files::sync_directory(link)
}

/// Why a runtime would not load a configuration.
#[derive(Debug, thiserror::Error)]
enum NotAList {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("it has no `name`")]
    NoName,
    #[error("it has no `plugins`")]
    NoPlugins,
    #[error("plugin {0} has no `type`")]
    NoType(usize),
}

/// Checks that a runtime would load this text. The runtime reports a fault only in its own log, so the agent reports it as well.
fn check(text: &[u8]) -> Result<(), NotAList> {
    let list: Value = serde_json::from_slice(text)?;
    let named = |value: &Value, key: &str| value[key].as_str().is_some_and(|name| !name.is_empty());
    if !named(&list, "name") {
        return Err(NotAList::NoName);
    }
    match list["plugins"].as_array() {
        Some(plugins) if !plugins.is_empty() => match plugins.iter().position(|plugin| !named(plugin, "type")) {
            Some(at) => Err(NotAList::NoType(at + 1)),
            None => Ok(()),
        },
        _ => Err(NotAList::NoPlugins),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const LIST: &str = r#"{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{}}]}"#;

    struct Place {
        dir: tempfile::TempDir,
        conflist: Conflist,
    }

    impl Place {
        fn new() -> Place {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("run")).unwrap();
            fs::write(dir.path().join("conf.json"), LIST).unwrap();
            let conflist = agent(dir.path());
            Place { dir, conflist }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn look(&mut self) {
            self.conflist.look_again();
            self.conflist.keep(Instant::now());
        }

        /// Returns the link's inode, and what is read through it.
        fn seen(&self) -> (u64, String) {
            let link = self.path("net.d").join(NAME);
            let inode = fs::symlink_metadata(&link).unwrap();
            assert!(inode.is_symlink());
            (inode.ino(), fs::read_to_string(link).unwrap())
        }
    }

    fn agent(dir: &Path) -> Conflist {
        let options = CniOptions { conf: dir.join("conf.json"), dir: dir.join("net.d") };
        Conflist::new(Some(options), &dir.join("run/subnet.env"))
    }

    #[test]
    fn it_waits_for_subnet_env_and_then_writes_once() {
        let mut place = Place::new();
        place.look();
        assert!(!place.path("net.d").exists(), "nothing must be published before subnet.env");
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.conflist.keep(Instant::now());
        let first = place.seen();
        assert_eq!(first.1, LIST);
        place.look();
        assert_eq!(place.seen(), first, "nothing changed, so nothing must be written");
        let left = fs::read_dir(place.path("net.d")).unwrap().count();
        assert_eq!(left, 1, "no temporary file must be left behind");
    }

    #[test]
    fn a_new_agent_makes_a_new_link() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.look();
        // This hard link keeps the inode, so that its number is not used again.
        fs::hard_link(place.path("net.d").join(NAME), place.path("net.d/held")).unwrap();
        let (inode, _) = place.seen();
        place.conflist = agent(place.dir.path());
        place.look();
        assert_ne!(place.seen().0, inode, "the runtime may not have read the old link");
    }

    #[test]
    fn edits_are_published_and_removals_repaired() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        // flannel left this file.
        fs::create_dir(place.path("net.d")).unwrap();
        fs::write(place.path("net.d").join(NAME), "{}").unwrap();
        place.look();
        assert_eq!(place.seen().1, LIST);
        let edited = LIST.replace("cbr0", "other");
        fs::write(place.path("conf.json"), &edited).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited);
        fs::remove_file(place.path("run").join(NAME)).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited, "the file came back");
        fs::remove_file(place.path("net.d").join(NAME)).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited, "the link came back");
    }

    #[test]
    fn a_configuration_that_no_runtime_would_load_is_not_published() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.look();
        for (text, why) in [
            ("{", "EOF"),
            ("[]", "no `name`"),
            (r#"["cbr0",[["flannel"]]]"#, "no `name`"),
            (r#"{"plugins":[{"type":"flannel"}]}"#, "no `name`"),
            (r#"{"name":"","plugins":[{"type":"flannel"}]}"#, "no `name`"),
            (r#"{"name":"cbr0","type":"flannel"}"#, "no `plugins`"),
            (r#"{"name":"cbr0","plugins":[]}"#, "no `plugins`"),
            (r#"{"name":"cbr0","plugins":[{"delegate":{}}]}"#, "plugin 1 has no `type`"),
            (r#"{"name":"cbr0","plugins":[{"type":"a"},{"type":""}]}"#, "plugin 2 has no `type`"),
        ] {
            fs::write(place.path("conf.json"), text).unwrap();
            place.look();
            let problem = place.conflist.problem().unwrap();
            assert!(problem.contains(why), "{text}: {problem}");
            let remedy = format!("correct {};", place.path("conf.json").display());
            assert!(problem.contains(&remedy), "{problem}");
            assert_eq!(place.seen().1, LIST, "the last good configuration must stay");
        }
        fs::remove_file(place.path("conf.json")).unwrap();
        place.look();
        assert!(place.conflist.problem().unwrap().contains("conf.json: No such file"));
        fs::write(place.path("conf.json"), LIST).unwrap();
        place.look();
        assert_eq!(place.conflist.problem(), None);
    }

    #[test]
    fn the_configmap_is_named_only_where_the_manifests_mount_it() {
        let text = remedy(Path::new("/etc/kube-flannel/cni-conf.json"));
        assert!(text.starts_with("correct cni-conf.json (ConfigMap kube-flannel-cfg);"), "{text}");
        let text = remedy(Path::new("/etc/weft/cni-conf.json"));
        assert!(text.starts_with("correct /etc/weft/cni-conf.json;"), "{text}");
    }

    #[test]
    fn only_our_own_link_is_removed() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.look();
        let (dir, env, link) = (place.path("net.d"), place.path("run/subnet.env"), place.path("net.d").join(NAME));
        assert!(!remove(&dir, &place.path("other/subnet.env")).unwrap(), "that is the link of another instance");
        assert!(link.exists());
        assert!(remove(&dir, &env).unwrap());
        assert!(!link.is_symlink() && !place.path("run").join(NAME).exists());
        fs::write(&link, "{}").unwrap();
        assert!(!remove(&dir, &env).unwrap(), "a regular file belongs to another program");
        assert!(link.exists());
    }

    #[test]
    fn two_agents_with_one_directory_have_two_files() {
        let mut first = Place::new();
        fs::write(first.path("run/subnet.env"), "").unwrap();
        fs::write(first.path("run/second.env"), "").unwrap();
        let edited = LIST.replace("cbr0", "cbr1");
        fs::write(first.path("second.json"), &edited).unwrap();
        let options = CniOptions { conf: first.path("second.json"), dir: first.path("net.d") };
        let mut second = Conflist::new(Some(options), &first.path("run/second.env"));
        first.look();
        let before = first.seen();
        second.keep(Instant::now());
        first.look();
        assert_eq!(first.seen(), before, "the link and the file of the first agent must stay");
        let link = first.path("net.d/10-flannel_second.env.conflist");
        assert_eq!(fs::read_to_string(&link).unwrap(), edited);
        let mut names: Vec<_> =
            fs::read_dir(first.path("net.d")).unwrap().map(|name| name.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names[0], NAME, "runtimes use the configuration of the usual agent");
        assert!(
            first.conflist.problem().unwrap().contains("10-flannel_second.env.conflist"),
            "each agent must name the configuration of the other"
        );
        assert!(remove(&first.path("net.d"), &first.path("run/second.env")).unwrap());
        assert_eq!(first.seen(), before);
        assert!(!link.is_symlink());
    }
}
