// SPDX-License-Identifier: Apache-2.0
//! Publishes the CNI configuration as soon as pods can be reached.
//!
//! A container runtime calls the network of a node ready as soon as it finds a configuration. So the agent writes it into the runtime's
//! directory when pods can be reached. A boot does not empty that directory. So at the start after a boot the agent removes what an
//! earlier run published, until pods can be reached again. docs/adr/032-cni-configuration.md has the reasons.
//!
//! A copy beside subnet.env says what was published since the boot. By this copy the agent tells its own file from one that another
//! program has changed.

mod list;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;
use weft_cni::conf_dir::is_conf;
use weft_subnet::env::sibling_file;

use self::list::{List, NotAList, is_of_multus};
use crate::files;
use crate::options::CniOptions;

/// Name of the configuration in both directories. It is flannel's name, so that ours replaces flannel's file. An agent whose subnet file
/// is not called `subnet.env` uses `10-flannel_NAME.conflist`. Runtimes use the first configuration in the order of names, which is this one.
pub const NAME: &str = "10-flannel.conflist";
/// Changes of the file by other programs are noticed within this time.
const EVERY: Duration = Duration::from_secs(10);

/// Publishes the configuration. Without [`CniOptions`] it does nothing.
#[derive(Debug, Default)]
pub struct Conflist {
    options: Option<CniOptions>,
    subnet_file: PathBuf,
    next: Option<Instant>,
    problem: Option<String>,
    remark: Option<String>,
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

    /// Returns what another program has added to the configuration. Nothing is wrong with that.
    pub fn remark(&self) -> Option<String> {
        self.remark.clone()
    }

    /// Returns the time at which [`Conflist::keep`] checks again.
    pub fn next(&self) -> Option<Instant> {
        self.next.filter(|_| self.options.is_some())
    }

    /// Takes notice that the source changed: the next [`Conflist::keep`] checks at once.
    pub fn look_again(&mut self) {
        self.next = None;
    }

    /// Writes the file if it is not as it should be. This must be called only while pods can be reached. It checks at most every ten
    /// seconds.
    pub fn keep(&mut self, now: Instant) {
        if self.options.is_none() || self.next.is_some_and(|next| now < next) {
            return;
        }
        // Without subnet.env the plugin would wait for it, and delay every pod.
        if !self.subnet_file.exists() {
            return;
        }
        self.next = Some(now + EVERY);
        let problem = match self.publish() {
            Ok(remark) => {
                if let Some(text) = remark.as_ref().filter(|_| self.remark != remark) {
                    tracing::info!("{text}");
                }
                self.remark = remark;
                self.other_configurations()
            }
            Err(error) => Some(error.to_string()),
        };
        let problem = problem.map(|text| format!("CNI configuration: {text}"));
        if self.problem != problem
            && let Some(text) = &problem
        {
            tracing::error!("{text}");
        }
        self.problem = problem;
    }

    /// Describes configurations of other programs. A runtime uses one of them after a boot, while ours is not there. Every runtime uses one
    /// that comes before ours in the order of names.
    fn other_configurations(&self) -> Option<String> {
        let dir = &self.options.as_ref()?.dir;
        let ours = place(dir, &self.subnet_file);
        let names = fs::read_dir(dir).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_one = |name: &String| {
            Some(name.as_ref()) != ours.file_name()
                && is_conf(name)
                && !files::read(&dir.join(name)).is_ok_and(|text| is_of_multus(&text))
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

    /// Publishes the configuration, unless it is there. Returns a remark if another program has added plugins to it.
    fn publish(&self) -> Result<Option<String>, PublishError> {
        let Some(CniOptions { conf, dir }) = &self.options else { return Ok(None) };
        let text = files::read(conf).map_err(|error| PublishError::Read { path: conf.clone(), error })?;
        let ours = List::parse(&text).map_err(|error| PublishError::NotAList { path: conf.clone(), error })?;
        let (copy, place) = (copy(&self.subnet_file), place(dir, &self.subnet_file));
        let (published, present) = (files::read(&copy).ok(), regular(&place));
        let is_changed = present != published;
        if let Some(list) = present.as_ref().filter(|_| is_changed).and_then(|present| List::parse(present).ok())
            && let added = list.added_to(&ours)
            && !added.is_empty()
        {
            if published.is_none() {
                write(&copy, &text)?;
            }
            return Ok(Some(remark(&place, conf, &added, list.contains(&ours))));
        }
        if present.as_ref() != Some(&text) {
            // This replaces also a link, which earlier versions made, and what is behind it stays as it is.
            let failed = |error| PublishError::Publish { path: place.clone(), dir: dir.clone(), error };
            files::replace(&place, &text, 0o644).map_err(failed)?;
            tracing::info!(file = %place.display(), "CNI configuration published");
        }
        write(&copy, &text)?;
        Ok(None)
    }
}

/// At the start after a boot, removes the configuration that an earlier run of the agent published. So the node is not ready until pods can
/// be reached. A boot empties the directory of subnet.env, so that neither subnet.env nor our copy is there. What another program has
/// changed stays.
pub fn withdraw_after_boot(options: Option<&CniOptions>, subnet_file: &Path) {
    let Some(CniOptions { conf, dir }) = options else { return };
    if subnet_file.exists() || copy(subnet_file).exists() {
        return;
    }
    let place = place(dir, subnet_file);
    let list = |text: Option<Vec<u8>>| List::parse(&text?).ok();
    // Without a source nothing could be published again.
    let Some((present, ours)) = list(regular(&place)).zip(list(files::read(conf).ok())) else { return };
    if !present.is_like(&ours) || !present.added_to(&ours).is_empty() {
        return;
    }
    match files::remove(&place) {
        Ok(()) => tracing::info!(file = %place.display(), "CNI configuration withdrawn until pods can be reached"),
        Err(error) => {
            tracing::warn!(file = %place.display(), %error, "cannot withdraw the CNI configuration: pods may start early");
        }
    }
}

/// Where the manifests of weft and flannel mount the ConfigMap.
const MOUNTED: &str = "/etc/kube-flannel";

/// Names the file of `--cni-conf` as an operator edits it.
fn name_of(conf: &Path) -> String {
    if conf.starts_with(MOUNTED) {
        "cni-conf.json (ConfigMap kube-flannel-cfg)".to_owned()
    } else {
        conf.display().to_string()
    }
}

/// Returns what to do about a configuration that cannot be published.
fn remedy(conf: &Path) -> String {
    format!("correct {}; nothing new is published until then", name_of(conf))
}

/// Describes a file to which another program added plugins. `is_current`: all of our plugins are in it as they should be.
fn remark(place: &Path, conf: &Path, added: &[&str], is_current: bool) -> String {
    let (file, added) = (place.display(), added.join(", "));
    let what = format!("CNI configuration: another program added {added} to {file}, so weft leaves the file alone");
    if is_current {
        return what;
    }
    format!(
        "{what}; {} is different by now: to publish it, run `rm {file}`, and the other program adds its plugins again",
        name_of(conf)
    )
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
    #[error("publish {}: {error}{}", path.display(), files::remedy(error, dir))]
    Publish { path: PathBuf, dir: PathBuf, error: io::Error },
}

fn write(copy: &Path, text: &[u8]) -> Result<(), PublishError> {
    files::write(copy, text).map_err(|error| PublishError::Write { path: copy.to_owned(), error })?;
    Ok(())
}

/// Removes the configuration that an agent with this subnet file published since the boot, also if another program has added plugins to
/// it, the link of an earlier version, and our copy. Returns true if there was such a configuration.
///
/// # Errors
/// The configuration or the copy cannot be removed.
pub fn remove(dir: &Path, subnet_file: &Path) -> io::Result<bool> {
    let (copy, place) = (copy(subnet_file), place(dir, subnet_file));
    let is_link = fs::read_link(&place).is_ok_and(|to| to == copy);
    let ours =
        is_link || regular(&place).zip(files::read(&copy).ok()).is_some_and(|(present, ours)| is_of(&present, &ours));
    if ours {
        files::remove(&place)?;
    }
    files::remove(&copy)?;
    Ok(ours)
}

/// Returns the path of a configuration under our name that [`remove`] left, because nothing shows that weft wrote it.
pub fn left(dir: &Path, subnet_file: &Path) -> Option<PathBuf> {
    Some(place(dir, subnet_file)).filter(|place| regular(place).is_some())
}

/// True if this text was published, or if another program has only added plugins to it.
fn is_of(present: &[u8], published: &[u8]) -> bool {
    let lists = || List::parse(present).ok().zip(List::parse(published).ok());
    present == published || lists().is_some_and(|(present, published)| !present.added_to(&published).is_empty())
}

/// Returns the path of our copy. It is beside subnet.env, so a boot removes both. The path is absolute, because earlier versions made a link
/// to it.
fn copy(subnet_file: &Path) -> PathBuf {
    let file = sibling_file(subnet_file, NAME, |name| format!("10-flannel_{name}.conflist"));
    std::path::absolute(&file).unwrap_or(file)
}

/// Returns the path of the configuration in the directory of the runtime. It has the name of the copy.
fn place(dir: &Path, subnet_file: &Path) -> PathBuf {
    dir.join(copy(subnet_file).file_name().unwrap_or_default())
}

/// Returns the contents of a regular file. Links are not followed.
fn regular(path: &Path) -> Option<Vec<u8>> {
    fs::symlink_metadata(path).ok().filter(|about| about.is_file())?;
    files::read(path).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    const LIST: &str = r#"{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{}}]}"#;
    /// What istio-cni makes of it.
    const CHAINED: &str =
        r#"{"cniVersion":"0.3.1","name":"cbr0","plugins":[{"delegate":{},"type":"flannel"},{"type":"istio-cni"}]}"#;

    struct Place {
        dir: tempfile::TempDir,
        conflist: Conflist,
    }

    impl Place {
        /// A node after its boot.
        fn booted() -> Place {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("run")).unwrap();
            fs::create_dir(dir.path().join("net.d")).unwrap();
            fs::write(dir.path().join("conf.json"), LIST).unwrap();
            let conflist = Conflist::new(Some(options(dir.path())), &dir.path().join("run/subnet.env"));
            Place { dir, conflist }
        }

        /// A node whose subnet.env is there.
        fn new() -> Place {
            let place = Place::booted();
            fs::write(place.path("run/subnet.env"), "").unwrap();
            place
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn file(&self) -> PathBuf {
            self.path("net.d").join(NAME)
        }

        fn look(&mut self) {
            self.conflist.look_again();
            self.conflist.keep(Instant::now());
        }

        /// Returns the inode of the file and its contents. The file must be a regular one, because some programs see only its directory.
        fn seen(&self) -> (u64, String) {
            let about = fs::symlink_metadata(self.file()).unwrap();
            assert!(about.is_file());
            (about.ino(), fs::read_to_string(self.file()).unwrap())
        }

        fn withdraw(&self) {
            withdraw_after_boot(Some(&options(self.dir.path())), &self.path("run/subnet.env"));
        }

        fn remove(&self) -> bool {
            remove(&self.path("net.d"), &self.path("run/subnet.env")).unwrap()
        }
    }

    fn options(dir: &Path) -> CniOptions {
        CniOptions { conf: dir.join("conf.json"), dir: dir.join("net.d") }
    }

    #[test]
    fn it_waits_for_subnet_env_and_then_writes_once() {
        let mut place = Place::booted();
        place.look();
        assert!(!place.file().exists(), "nothing must be published before subnet.env");
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.conflist.keep(Instant::now());
        let first = place.seen();
        assert_eq!(first.1, LIST);
        assert_eq!(fs::metadata(place.file()).unwrap().mode() & 0o777, 0o644, "other users may read it");
        place.look();
        assert_eq!(place.seen(), first, "nothing changed, so nothing must be written");
        let left = fs::read_dir(place.path("net.d")).unwrap().count();
        assert_eq!(left, 1, "no temporary file must be left behind");
        // Another agent with the same subnet file goes on.
        place.conflist = Conflist::new(Some(options(place.dir.path())), &place.path("run/subnet.env"));
        place.look();
        assert_eq!(place.seen(), first);
    }

    /// The loop of the agent calls it at each event, and at the time that it names.
    #[test]
    fn it_looks_at_the_file_every_ten_seconds() {
        let (mut place, now) = (Place::new(), Instant::now());
        place.conflist.keep(now);
        fs::remove_file(place.file()).unwrap();
        assert_eq!(place.conflist.next(), Some(now + EVERY));
        place.conflist.keep(now + EVERY / 2);
        assert!(!place.file().exists(), "it does not look at each event");
        place.conflist.keep(now + EVERY);
        assert_eq!(place.seen().1, LIST);
        assert_eq!(Conflist::new(None, &place.path("run/subnet.env")).next(), None, "there is nothing to publish");
    }

    #[test]
    fn a_link_of_an_earlier_version_is_replaced_and_removed() {
        let mut place = Place::new();
        let target = place.path("run").join(NAME);
        for text in [LIST, CHAINED] {
            fs::write(&target, text).unwrap();
            symlink(&target, place.file()).unwrap();
            place.look();
            assert_eq!(place.seen().1, LIST);
            assert!(place.remove() && !place.file().exists() && !target.exists());
        }
        fs::write(&target, LIST).unwrap();
        symlink(&target, place.file()).unwrap();
        assert!(place.remove() && !place.file().is_symlink() && !target.exists());
    }

    #[test]
    fn edits_are_published_and_removals_repaired() {
        let mut place = Place::new();
        // flannel left this file.
        fs::write(place.file(), "{}").unwrap();
        place.look();
        assert_eq!(place.seen().1, LIST);
        let edited = LIST.replace("cbr0", "other");
        fs::write(place.path("conf.json"), &edited).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited);
        fs::remove_file(place.path("run").join(NAME)).unwrap();
        place.look();
        assert_eq!(fs::read_to_string(place.path("run").join(NAME)).unwrap(), edited, "the copy came back");
        fs::remove_file(place.file()).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited, "the file came back");
        fs::write(place.file(), edited.replace("delegate", "mistake")).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited, "an edit in place is undone");
    }

    #[test]
    fn what_another_program_added_stays_and_is_told() {
        let mut place = Place::new();
        place.look();
        fs::write(place.file(), CHAINED).unwrap();
        place.look();
        assert_eq!(place.seen().1, CHAINED);
        assert_eq!(place.conflist.problem(), None);
        let remark = place.conflist.remark().unwrap();
        assert!(remark.contains("added istio-cni to") && !remark.contains("rm "), "{remark}");
        // Without our copy, `weft cleanup` would leave the file.
        let copy = place.path("run").join(NAME);
        fs::remove_file(&copy).unwrap();
        place.look();
        assert_eq!((place.seen().1.as_str(), fs::read_to_string(&copy).unwrap().as_str()), (CHAINED, LIST));
        // It stays when our source changes, and the remark says what to do.
        let edited = LIST.replace(r#""delegate":{}"#, r#""delegate":{"mtu":1400}"#);
        fs::write(place.path("conf.json"), &edited).unwrap();
        place.look();
        assert_eq!(place.seen().1, CHAINED);
        let remark = place.conflist.remark().unwrap();
        let command = format!("rm {}", place.file().display());
        assert!(remark.contains("conf.json is different by now") && remark.contains(&command), "{remark}");
        fs::remove_file(place.file()).unwrap();
        place.look();
        assert_eq!((place.seen().1, place.conflist.remark()), (edited, None));
    }

    /// Only our copy tells this file from one to which another program added `portmap`.
    #[test]
    fn a_plugin_that_the_source_lost_goes() {
        let mut place = Place::new();
        let with_more = LIST.replace("}}]", r#"}},{"type":"portmap"}]"#);
        fs::write(place.path("conf.json"), &with_more).unwrap();
        place.look();
        assert_eq!(place.seen().1, with_more);
        fs::write(place.path("conf.json"), LIST).unwrap();
        place.look();
        assert_eq!((place.seen().1.as_str(), place.conflist.remark()), (LIST, None));
    }

    #[test]
    fn after_a_boot_it_is_withdrawn_unless_another_program_changed_it() {
        let place = Place::booted();
        let edited = LIST.replace(r#""delegate":{}"#, r#""delegate":{"mtu":1400}"#);
        for (text, stays) in
            [(LIST, false), (&edited, false), (CHAINED, true), ("{", true), (&LIST.replace("cbr0", "another"), true)]
        {
            fs::write(place.file(), text).unwrap();
            place.withdraw();
            assert_eq!(place.file().exists(), stays, "{text}");
        }
        // No boot: subnet.env is there, of flannel for example, or our copy.
        for file in ["run/subnet.env", "run/10-flannel.conflist"] {
            fs::write(place.file(), LIST).unwrap();
            fs::write(place.path(file), "").unwrap();
            place.withdraw();
            assert!(place.file().exists(), "{file}");
            fs::remove_file(place.path(file)).unwrap();
        }
        fs::remove_file(place.path("conf.json")).unwrap();
        place.withdraw();
        assert!(place.file().exists(), "nothing could take its place");
    }

    #[test]
    fn multus_is_no_other_network() {
        let mut place = Place::new();
        fs::write(place.path("net.d/00-multus.conf"), r#"{"name":"multus","type":"multus-shim"}"#).unwrap();
        fs::write(place.path("net.d/87-podman.conflist.bak"), LIST).unwrap();
        place.look();
        assert_eq!(place.conflist.problem(), None, "no runtime reads a file of another name");
        for name in ["89-c.json", "88-b.conf", "87-podman.conflist"] {
            fs::write(place.path("net.d").join(name), LIST).unwrap();
        }
        place.look();
        let problem = place.conflist.problem().unwrap();
        assert!(problem.contains(" has 87-podman.conflist, 88-b.conf, 89-c.json too"), "{problem}");
    }

    #[test]
    fn a_configuration_that_no_runtime_would_load_is_not_published() {
        let mut place = Place::new();
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
    fn only_what_an_agent_published_is_removed() {
        let mut place = Place::new();
        for (change, ours) in [(LIST, true), (CHAINED, true), ("{}", false), (&LIST.replace("cbr0", "cbr9"), false)] {
            place.look();
            fs::write(place.file(), change).unwrap();
            assert_eq!(place.remove(), ours, "{change}");
            assert_eq!(place.file().exists(), !ours, "{change}");
            assert!(!place.path("run").join(NAME).exists());
            let left = left(&place.path("net.d"), &place.path("run/subnet.env"));
            assert_eq!(left, (!ours).then(|| place.file()));
        }
        fs::write(place.file(), LIST).unwrap();
        assert!(!place.remove(), "without our copy it belongs to somebody else");
        assert!(place.file().exists());
    }

    #[test]
    fn two_agents_with_one_directory_have_two_files() {
        let mut first = Place::new();
        fs::write(first.path("run/second.env"), "").unwrap();
        let edited = LIST.replace("cbr0", "cbr1");
        fs::write(first.path("second.json"), &edited).unwrap();
        let options = CniOptions { conf: first.path("second.json"), dir: first.path("net.d") };
        let mut second = Conflist::new(Some(options), &first.path("run/second.env"));
        first.look();
        let before = first.seen();
        second.keep(Instant::now());
        first.look();
        assert_eq!(first.seen(), before, "the file of the first agent must stay");
        let file = first.path("net.d/10-flannel_second.env.conflist");
        assert_eq!(fs::read_to_string(&file).unwrap(), edited);
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
        assert!(!file.exists());
    }
}
